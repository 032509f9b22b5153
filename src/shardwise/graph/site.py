"""Where a rule works: it runs calls without data and adds layers to the graph that is being built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.geometry.access import Access
from shardwise.graph.fake import Fakes, Made, Ran, Value
from shardwise.graph.layer import Call, Kind, Layer, Operand, Ref, Source
from shardwise.graph.trace import Step, transform

Reads = Sequence[tuple[str, Value, Access]]
Contracts = tuple[tuple[tuple[int, int], ...], ...]


class Site:
    """One step of the trace, being turned into layers.

    Args:
        step: what the user's code calls.
        fakes: runs calls without data.
        layers: the layers so far; `add` appends to them.
        unique: makes a layer's name unique.
    """

    def __init__(self, step: Step, fakes: Fakes, layers: list[Layer], unique: Callable[[str], str]) -> None:
        self.step = step
        self.fakes = fakes
        self.layers = layers
        self.unique = unique

    def run(self, target: Any, *args: Any, **kwargs: Any) -> Ran:
        """Run a call without data."""
        return self.fakes.run(target, args, kwargs)

    def add(
        self,
        ran: Ran,
        call: tuple[Any, tuple[Any, ...], Mapping[str, Any]],
        *,
        kind: Kind,
        op: str,
        reads: Reads,
        attributes: Mapping[str, Any] | None = None,
        contracts: Contracts = (),
        flops: tuple[int, int] = (0, 0),
        suffix: str = "",
        base: str = "",
        reason: str = "",
    ) -> Value:
        """Add the layer that makes the (only) result of `ran` and return its value."""
        name = self.unique((base or self.step.label) + suffix)
        values = [value for _, value, _ in reads]
        target, args, kwargs = call
        args, kwargs = _refer((args, dict(kwargs)), values)
        self.layers.append(
            Layer(
                name=name,
                kind=kind,
                op=op,
                operands=tuple(Operand(role, v.name, v.origin, v.spec, access) for role, v, access in reads),
                outputs=tuple(made.spec for made in ran.made),
                attributes=dict(attributes or {}),
                call=Call(target, args, kwargs),
                contracts=contracts,
                module=self.step.module if not suffix else "",
                where=self.step.where,
                reason=reason,
                forward_flops=flops[0],
                backward_flops=flops[1],
                saved_bytes=_saved_bytes(ran),
                saves=_saves(ran, name),
                alias=_alias(ran),
            )
        )
        return value_of(ran.made[0], name, ran)

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], **layer: Any) -> Value:
        """Run a call and add it as a layer; `reads` may be a function of what was made."""
        ran = self.fakes.run(target, args, kwargs)
        reads = layer.pop("reads")
        reads = reads(ran.one) if callable(reads) else reads
        return self.add(ran, (target, args, kwargs), reads=reads, **layer)


def value_of(made: Made, name: str, ran: Ran) -> Value:
    """Return the value of a layer's result; a view belongs to the value whose memory it shares."""
    owner = name if made.alias is None else ran.values[made.alias].owner
    return Value(name, Source.VALUE, made.spec, made.stride, made.trained, owner)


def _saves(ran: Ran, name: str) -> tuple[str, ...]:
    kept = [ran.values[i] for i in ran.kept_args]
    names = [value.name for value in kept if value.origin is Source.VALUE]
    own = [name] if len(ran.made) == 1 else [part_name(name, i) for i in range(len(ran.made))]
    return (*dict.fromkeys(names), *(own[i] for i in ran.kept_outs))


def part_name(name: str, index: int) -> str:
    """Return the name of the layer that takes one tensor of a nested result."""
    return f"{name}.{index}"


def _saved_bytes(ran: Ran) -> int:
    kept = [ran.values[i] for i in ran.kept_args if ran.values[i].origin is Source.VALUE]
    return (
        ran.kept_bytes
        + sum(value.spec.nbytes for value in kept)
        + sum(ran.made[i].spec.nbytes for i in ran.kept_outs)
    )


def _alias(ran: Ran) -> str:
    shared = ran.made[0].alias if len(ran.made) == 1 else None
    if shared is None or ran.values[shared].origin is not Source.VALUE:
        return ""
    return ran.values[shared].name


def _refer(tree: Any, values: Sequence[Value]) -> Any:
    """Replace values by references to operands; a value that is read twice takes its operands in turn."""
    places: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        places.setdefault(id(value), []).append(i)

    def leaf(item: Any) -> Any:
        if not isinstance(item, Value):
            return item
        free = places[id(item)]
        return Ref(free.pop(0) if len(free) > 1 else free[0])

    return transform(tree, leaf)


def module_state(step: Step, held: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """Return local names and values of an opaque module's parameters and buffers."""
    return tuple((local, held[name]) for local, name in step.state.items())
