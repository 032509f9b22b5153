"""The lowered operations of one stage: what a group of ranks computes and exchanges, in order.

One list serves the whole group. An operation holds layouts, that is, the boxes of all ranks; a rank
executes its own part, the oracle prices any part, and the order of communications is the same on every
rank because there is only one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.geometry import Box, Layout, Message, Range
from shardwise.graph import Layer, TensorSpec
from shardwise.program.alike import kinds


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as the ranks of a group hold it: which value (or parameter) it is, and in which slot it lies.

    The same value can be held twice, once as it was made and once with its halo. With `margins` (per rank
    and dimension how far below and above) the stored tensor is larger than the box, with zeros around it:
    the padding of a convolution that the local kernel could not add on one side alone.
    """

    value: str
    slot: str
    layout: Layout
    spec: TensorSpec
    grad: bool = True
    margins: tuple[tuple[Range, ...], ...] | None = None

    def stored(self, rank: int) -> Box:
        """Return what a rank's tensor covers: its box, and the zeros around it, outside of the image."""
        box = self.layout.box(rank)
        if self.margins is None:
            return box
        around = self.margins[rank]
        lo = tuple(a - m for a, (m, _) in zip(box.lo, around, strict=True))
        return Box(lo, tuple(b + m for b, (_, m) in zip(box.hi, around, strict=True)))


@dataclass(frozen=True)
class Compute:
    """Run one layer on every rank's own boxes; no communication.

    `reads` and `wants` have one entry per operand of the layer: what is there, and which part of it the
    layer needs. `makes.layout` is partial where a contraction was cut. With `landing`, the result is made
    inside that of the regrid that reads it.
    """

    layer: Layer
    reads: tuple[Held, ...]
    wants: tuple[Layout, ...]
    makes: Held
    landing: bool = False

    @cached_property
    def kinds(self) -> list[list[int]]:
        """Return the ranks by what they do, all in one list the same."""
        return kinds(self)


@dataclass(frozen=True)
class Regrid:
    """Move a tensor of the group from one layout to another.

    With `landing`, ranks that keep all that they hold make it where it will stay, inside the result.
    """

    source: Held
    makes: Held
    messages: tuple[Message, ...]
    why: str = ""
    landing: bool = False

    def messages_of(self, rank: int) -> Sequence[Message]:
        """Return the messages that a rank sends or receives, those to itself included, in their order."""
        return self._by_rank.get(rank, ())

    def widens(self, rank: int) -> bool:
        """Tell whether a rank's result holds all that it held before."""
        layout = self.source.layout
        return not layout.partial and self.makes.stored(rank).contains(layout.box(rank))

    def lands(self, rank: int) -> bool:
        """Tell whether a rank makes what it holds inside the result."""
        held = self.source.layout.box(rank)
        kept = [m.box for m in self.messages_of(rank) if m.source == m.target] if self.landing else []
        return kept == [held] and self.widens(rank)

    @cached_property
    def is_sum(self) -> bool:
        """Tell whether every rank gets the sum of what all of them hold, which one collective does."""
        src, dst = self.source.layout, self.makes.layout
        return src.ranks == dst.ranks and src.partial and dst.is_whole and src.as_partial(False).is_whole

    @cached_property
    def _by_rank(self) -> dict[int, list[Message]]:
        """Sort the messages once: wide groups have thousands of them, and every rank asks for its own."""
        result: dict[int, list[Message]] = {}
        for message in self.messages:
            for rank in {message.source, message.target}:
                result.setdefault(rank, []).append(message)
        return result


@dataclass(frozen=True)
class Normalise:
    """Normalise with statistics that several ranks share: sums, one reduction, then local work.

    `owned` says which part of what a rank holds enters the statistics, `samples` how many samples they run
    over, and `over` with whom they are shared: all ranks of the group and of its replicas, or only the
    same position of each replica (where channels are cut, each rank has channels of its own). One that
    `rectifies` makes what the rectification behind it would; with `landing`, inside the result of the regrid
    that reads it.
    """

    layer: Layer
    reads: tuple[Held, ...]
    wants: tuple[Layout, ...]
    makes: Held
    owned: Layout
    samples: int
    over: str
    rectifies: bool = False
    landing: bool = False

    @cached_property
    def kinds(self) -> list[list[int]]:
        """Return the ranks by what they do, all in one list the same."""
        return kinds(self)


Op = Compute | Regrid | Normalise


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The forward pass of one stage on one group; backward is the same list reversed.

    Args:
        ops: in execution order.
        arrivals: values made elsewhere (model inputs, targets, other stages), as this group wants them.
        departures: values that are used elsewhere, as this group makes them.
        parameters: for each parameter or buffer of the stage, which box each rank needs.
        width: the number of ranks.
    """

    ops: tuple[Op, ...]
    arrivals: dict[str, Held]
    departures: dict[str, Held]
    parameters: dict[str, Layout]
    buffers: dict[str, Layout]
    width: int
    frozen: frozenset[str] = field(default_factory=frozenset)
