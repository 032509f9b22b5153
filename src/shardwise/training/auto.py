"""Choose a plan when the user gives none."""

from __future__ import annotations

from shardwise.graph import Graph
from shardwise.plan import Plan


def auto_plan(graph: Graph, ranks: int, batch: int) -> Plan:
    """Return a plan for so many ranks by a simple rule.

    As many replicas as there are samples for, if that leaves no rank over; then the ranks of each replica
    share the image in tiles as square as possible, or, where there is no image, the layers in stages.

    Args:
        graph: the network.
        ranks: how many ranks there are.
        batch: samples of a global mini-batch.
    """
    data = max(d for d in range(1, ranks + 1) if ranks % d == 0 and d <= max(1, batch))
    inside = ranks // data
    if inside == 1:
        return Plan.parse(f"data={data}")
    dims = len(graph.shapes[0]) - 2
    if dims < 1:
        return Plan.parse(f"data={data} stages={inside}")
    grid = _grid(inside, dims)
    return Plan.parse(f"data={data} spatial={'x'.join(map(str, grid))}")


def _grid(tiles: int, dims: int) -> tuple[int, ...]:
    """Share out the prime factors, largest first, each to the dimension with the fewest parts."""
    grid = [1] * dims
    factor, rest, factors = 2, tiles, []
    while rest > 1:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    for prime in reversed(factors):
        grid[grid.index(min(grid))] *= prime
    return tuple(grid)
