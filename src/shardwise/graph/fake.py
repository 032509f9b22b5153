"""Run a call on tensors without data: shapes, dtypes, strides, and what autograd would keep.

Nothing is computed and nothing of the model is touched. Calls that look alike are run once: deep networks
repeat the same few layers hundreds of times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from shardwise.graph.example import dtype_of
from shardwise.graph.layer import Device, ModuleTarget, Source, TensorSpec
from shardwise.graph.trace import leaves, transform


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor that flows through the network, without its data.

    Args:
        name: the layer that makes it, or the name of the parameter or buffer.
        stride: memory strides, since some functions depend on them.
        trained: whether gradients flow into it.
        owner: name of the value whose memory it shares (its own, unless it is a view).
    """

    name: str
    origin: Source
    spec: TensorSpec
    stride: tuple[int, ...]
    trained: bool
    owner: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return len(self.spec.shape)


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a call made: `alias` is the number of the tensor argument whose memory it shares."""

    spec: TensorSpec
    stride: tuple[int, ...]
    trained: bool
    alias: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.spec.shape


@dataclass(frozen=True, slots=True)
class Ran:
    """What a call did: its result (with `Made` leaves) and what autograd keeps of it.

    Args:
        values: the distinct tensor arguments, in order.
        kept_args, kept_outs: numbers of the arguments and results that are kept.
        kept_bytes: what is kept beyond those, e.g. the indices of a max pooling.
    """

    result: Any
    values: tuple[Value, ...]
    kept_args: tuple[int, ...]
    kept_outs: tuple[int, ...]
    kept_bytes: int

    @property
    def made(self) -> tuple[Made, ...]:
        """Return the tensors among the results."""
        return tuple(leaf for leaf in leaves(self.result) if isinstance(leaf, Made))

    @property
    def one(self) -> Made:
        """Return the only result."""
        (made,) = self.made
        return made


class Fakes:
    """Run calls without data, remembering what was run before."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.memory: dict[Any, Ran] = {}

    def run(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any = ()) -> Ran:
        """Call `target`; `state` are (local name, value) pairs for an opaque module."""
        values = distinct((args, kwargs, state))
        number = {id(value): i for i, value in enumerate(values)}
        described = tuple((v.spec, v.stride, v.trained) for v in values)
        key = (target, _key((args, dict(kwargs), state), number), described)
        try:
            known = self.memory.get(key)
        except TypeError:  # an argument that cannot be hashed: run it every time
            return self._run(target, args, kwargs, state, values)
        if known is None:
            known = self.memory[key] = self._run(target, args, kwargs, state, values)
        return Ran(known.result, values, known.kept_args, known.kept_outs, known.kept_bytes)

    def flops(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any = ()) -> int:
        """Count the multiplications and additions of a call that has no formula of its own."""
        values = distinct((args, kwargs, state))
        with self.mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
            self._call(target, args, kwargs, state, {id(v): self._tensor(v) for v in values})
        return int(counter.get_total_flops())

    def _tensor(self, value: Value) -> Tensor:
        tensor = torch.empty_strided(value.shape, value.stride, dtype=dtype_of(value.spec))
        return tensor.requires_grad_(value.trained)

    def _call(self, target: Any, args: Any, kwargs: Any, state: Any, tensors: Mapping[int, Tensor]) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, Device):
                return torch.device("cpu")
            return tensors[id(item)] if isinstance(item, Value) else item

        args, kwargs = transform(args, leaf), transform(dict(kwargs), leaf)
        if isinstance(target, ModuleTarget):
            held = {local: tensors[id(value)] for local, value in state}
            return torch.func.functional_call(self.modules[target.path], held, args, kwargs)
        return target(*args, **kwargs)

    def _run(self, target: Any, args: Any, kwargs: Any, state: Any, values: tuple[Value, ...]) -> Ran:
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with self.mode, torch.enable_grad():
            tensors = {id(value): self._tensor(value) for value in values}
            before = {_storage(t): i for i, t in enumerate(tensors.values())}
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                result = self._call(target, args, kwargs, state, tensors)
            made: list[FakeTensor] = []

            def leaf(item: Any) -> Any:
                if isinstance(item, Tensor):
                    made.append(item)  # type: ignore[arg-type]
                    dtype = str(item.dtype).removeprefix("torch.")
                    spec = TensorSpec(tuple(int(n) for n in item.shape), dtype)
                    stride = tuple(int(n) for n in item.stride())
                    return Made(spec, stride, item.requires_grad, before.get(_storage(item)))
                return item

            described = transform(result, leaf)
        after = {_storage(tensor): i for i, tensor in enumerate(made)}
        unique = {_storage(tensor): tensor for tensor in kept}
        return Ran(
            result=described,
            values=values,
            kept_args=tuple(sorted(before[s] for s in unique if s in before)),
            kept_outs=tuple(sorted(after[s] for s in unique if s in after and s not in before)),
            kept_bytes=sum(
                t.untyped_storage().nbytes() for s, t in unique.items() if s not in before and s not in after
            ),
        )


def distinct(tree: Any) -> tuple[Value, ...]:
    """Return the different values in `tree`, in order of their first appearance."""
    return tuple({id(v): v for v in leaves(tree) if isinstance(v, Value)}.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _key(tree: Any, number: Mapping[int, int]) -> Any:
    if isinstance(tree, Value):
        return ("value", number[id(tree)])
    if isinstance(tree, (tuple, list)):
        return (type(tree), *(_key(v, number) for v in tree))
    if isinstance(tree, Mapping):
        return tuple((k, _key(v, number)) for k, v in tree.items())
    if isinstance(tree, slice):
        return ("slice", _key((tree.start, tree.stop, tree.step), number))
    # Equal numbers of different types are different arguments: 1, 1.0 and True.
    return (type(tree), tree)
