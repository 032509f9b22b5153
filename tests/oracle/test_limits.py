"""What hinders each strategy: ParaDL's Table V, row by row."""

import pytest
from oracle_cases import small_graph

from shardwise.oracle.limits import limits

D, S, P, F, C = ("data", "spatial", "pipeline", "filter", "channel")
DF, DS = ("data+filter", "data+spatial")
ALL = {D, S, P, F, C, DF, DS}


@pytest.mark.parametrize(
    ("kind", "what", "strategies"),
    [
        ("limits", "gradient exchange", {D, S, DF, DS}),
        ("limits", "collectives in every layer", {F, C, DF}),
        ("bottlenecks", "point-to-point messages", {S, P, DS}),
        ("bottlenecks", "congestion of shared links", ALL),
        ("bottlenecks", "input and staging of samples", ALL - {D}),
        ("bottlenecks", "redundant memory", ALL),
        ("bottlenecks", "memory fragmentation", ALL),
        ("limits", "weight update", ALL),
        ("limits", "uneven stages", {P}),
        ("bottlenecks", "kernels that do not shrink with the split", {F, C, DF}),
        ("limits", "number of ranks", ALL),
    ],
)
def test_a_limit_or_bottleneck_is_named_for_the_strategies_it_holds_for(kind, what, strategies):
    rows = limits(small_graph(), 4)
    assert {row.strategy for row in rows if what in getattr(row, kind)} == strategies
    other = "bottlenecks" if kind == "limits" else "limits"
    assert not any(what in getattr(row, other) for row in rows)
