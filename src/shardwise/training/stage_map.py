"""Cut another capture of the same network at the same places."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from shardwise.graph import Graph, Kind


def same_cuts(graph: Graph, cuts: Sequence[int], other: Graph) -> tuple[int, ...]:
    """Return where to cut `other` so that its layers lie in the stages that they have in `graph`.

    The behaviour in evaluation has almost the same layers as that in training, under the same names; a
    layer that only `other` has goes where its predecessor is.
    """
    stage, result = 0, []
    last = 0
    for i, layer in enumerate(other.layers):
        if layer.kind is Kind.INPUT:
            continue
        last = i
        if layer.name in graph.index:
            own = bisect.bisect_right(cuts, graph.index[layer.name])
            while stage < own:
                result.append(i)
                stage += 1
    # Stages without layers of their own are empty ranges at the end.
    return (*result, *(last + 1,) * (len(cuts) - len(result)))
