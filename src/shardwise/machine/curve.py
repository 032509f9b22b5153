"""A measured or assumed quantity that changes slowly with size."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

from shardwise.machine.errors import MachineError

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Interpolate linearly over log(x) between points of rising x; constant beyond both ends."""

    points: Points

    def __post_init__(self) -> None:
        check_points("curve", self.points)
        if self.points[0][0] <= 0:
            raise MachineError("curve", f"x = {self.points[0][0]} found", "log(x) needs x above zero")

    def at(self, x: float) -> float:
        """Return the value at `x`."""
        points = self.points
        if x <= points[0][0]:
            return points[0][1]
        if x >= points[-1][0]:
            return points[-1][1]
        i = bisect_right(points, (x, math.inf))
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)

    def at_least(self, other: Curve) -> Curve:
        """Return the higher of two curves, at the points of both."""
        places = sorted({x for curve in (self, other) for x, _ in curve.points})
        return Curve(tuple((x, max(self.at(x), other.at(x))) for x in places))


def check_points(field: str, points: Points) -> None:
    """Refuse a table that is empty or whose first column does not rise."""
    if not points:
        raise MachineError(field, "no points found", "give at least one [x, y] pair")
    for (a, _), (b, _) in itertools.pairwise(points):
        if b <= a:
            raise MachineError(field, f"x = {b} after x = {a}", "the first column must rise")
