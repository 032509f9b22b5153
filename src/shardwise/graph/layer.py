"""One layer of a captured network: what it is, what it reads, what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from shardwise.geometry.access import Access


class Kind(StrEnum):
    """The kinds of layers that splits are defined for; `OTHER` runs whole."""

    INPUT = "input"
    CONVOLUTION = "convolution"
    TRANSPOSED = "transposed convolution"
    POOLING = "pooling"
    NORMALISATION = "normalisation"
    ELEMENTWISE = "elementwise"
    JOIN = "join"
    LINEAR = "linear"
    RESIZE = "resize"
    RESHAPE = "reshape"
    REDUCTION = "reduction"
    DROPOUT = "dropout"
    LOSS = "loss"
    OTHER = "other"


class Source(StrEnum):
    """Where an operand comes from."""

    VALUE = "value"
    PARAMETER = "parameter"
    BUFFER = "buffer"


_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2}
_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor; the dtype is torch's name without `torch.`."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element."""
        return _BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self.numel * self.itemsize

    @property
    def is_float(self) -> bool:
        """Tell whether gradients can flow through it."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class Operand:
    """Something a layer reads: the value of another layer, a parameter or a buffer."""

    role: str
    source: str
    origin: Source
    spec: TensorSpec
    access: Access


@dataclass(frozen=True, slots=True)
class Ref:
    """Stand for operand number `index` inside the arguments of a `Call`."""

    index: int


@dataclass(frozen=True, slots=True)
class ModuleTarget:
    """Stand for one of the model's own modules as the target of a `Call`, by its path.

    The arguments are the module's; its parameters and buffers are operands of the layer too, their local
    names in the attribute `state` in the order of the operands.
    """

    path: str


@dataclass(frozen=True, slots=True)
class Device:
    """Stand for "the device that the layer runs on" inside the arguments of a `Call`."""


DEVICE = Device()


@dataclass(frozen=True, slots=True)
class Literal:
    """Stand for a string among the outputs of a model, where plain strings are names of layers."""

    value: str


@dataclass(frozen=True, slots=True)
class Call:
    """How the user's code computes the layer: a function, a tensor method or one of the model's modules.

    `args` and `kwargs` are the original ones, with a `Ref` where a tensor goes and every size resolved
    to the number it has for the shapes of this graph.
    """

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """A node of the captured network; its `name` is also the name of the value that it makes.

    Args:
        name: unique in the graph, the module's path where there is one.
        kind: what splits are possible in principle.
        op: the normalised operator (`conv`, `max_pool`, `batch_norm` ...), key of the execution rules.
        operands: what it reads, with the index arithmetic of each.
        outputs: the tensors it makes; more than one only for opaque layers.
        attributes: normalised static settings, plain Python values (`stride=(2, 2)`, `eps=1e-5` ...).
        call: how the user's own code computes it.
        contracts: groups of (operand index, dimension) pairs that the layer sums over, each group cut
            together: `(((0, 1), (1, 1)),)` for the channels of a convolution and of its weight,
            `(((0, 2),), ((0, 3),))` for a mean over pixels; cutting a group gives partial sums.
        module: path of the module in the model, or "" for a function call.
        where: file and line in the user's code, for messages.
        reason: for opaque layers, why nothing finer is known.
        forward_flops, backward_flops: multiply and add count as two.
        saved_bytes: what local autograd keeps for the backward pass, values of other layers included.
        saves: names of the values that it keeps (`<name>` for its own output).
        alias: name of the value whose memory its output shares, if it is a view.
    """

    name: str
    kind: Kind
    op: str
    operands: tuple[Operand, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    call: Call | None = None
    contracts: tuple[tuple[tuple[int, int], ...], ...] = ()
    module: str = ""
    where: str = ""
    reason: str = ""
    forward_flops: int = 0
    backward_flops: int = 0
    saved_bytes: int = 0
    saves: tuple[str, ...] = ()
    alias: str = ""

    @property
    def spec(self) -> TensorSpec:
        """Return the one output of the layer."""
        if len(self.outputs) != 1:
            raise ValueError(f"layer {self.name!r} ({self.op}) makes {len(self.outputs)} tensors, not one")
        return self.outputs[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the one output."""
        return self.spec.shape

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the layers it reads, in operand order, repeats included."""
        return tuple(o.source for o in self.operands if o.origin is Source.VALUE)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of its parameters as in `state_dict`."""
        return tuple(o.source for o in self.operands if o.origin is Source.PARAMETER)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Return the names of its buffers as in `state_dict`."""
        return tuple(o.source for o in self.operands if o.origin is Source.BUFFER)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of its parameters."""
        return sum(o.spec.nbytes for o in self.operands if o.origin is Source.PARAMETER)

    def operand(self, role: str) -> Operand | None:
        """Return the operand that plays `role`, or None."""
        return next((o for o in self.operands if o.role == role), None)
