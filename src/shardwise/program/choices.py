"""What a plan leaves open: the explicit plans among which `halo=auto` and `tail=auto` choose.

Lowering follows documented rules where a plan says `auto`. Whoever can price a plan may do better: lower each
of the candidates and take the cheapest. The first one is the plan itself, that is, the rules.
"""

from __future__ import annotations

import itertools

from shardwise.plan import Plan, Way

HALOS = ("auto", "layer", "2", "4", "fused")
TAILS = ("auto", "batch", "replicate", "filter")


def candidates(plan: Plan) -> tuple[Plan, ...]:
    """Return the plans that differ only in what `plan` leaves to `auto`, the plan itself first."""
    if not any(split.way is Way.SPATIAL for split in plan.stages):
        return (plan,)
    halos = HALOS if plan.halo == "auto" else (plan.halo,)
    tails = TAILS if plan.tail == "auto" else (plan.tail,)
    return tuple(plan.replace(halo=halo, tail=tail) for halo, tail in itertools.product(halos, tails))
