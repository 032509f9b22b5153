"""Remember what ranks need of operands: networks repeat the same few layers on the same few shapes."""

from __future__ import annotations

from operator import le, lt

from shardwise.geometry import Box
from shardwise.geometry.access import SAME, Access, needed_by_all


class Needs:
    """The boxes of operands that ranks need, of one lowering."""

    def __init__(self) -> None:
        # Boxes are told apart by identity, so they live as long as the answers.
        self._known: dict[tuple[object, ...], tuple[tuple[Box, ...], tuple[Box, ...]]] = {}

    def of(self, access: Access, shape: tuple[int, ...], outs: tuple[Box, ...]) -> tuple[Box, ...]:
        """Return which box of an operand each rank reads to make its box of the output."""
        if _is_same(access) and all(_inside(box, shape) for box in outs):
            return outs
        key = (access, shape, id(outs))
        if key not in self._known:
            self._known[key] = outs, needed_by_all(access, shape, outs)
        return self._known[key][1]


def _is_same(access: Access) -> bool:
    return all(axis.map is SAME and axis.out == dim for dim, axis in enumerate(access))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Tell whether a box of the output is one of the operand too, and not empty."""
    return len(box.hi) == len(shape) and all(map(lt, box.lo, box.hi)) and all(map(le, box.hi, shape))
