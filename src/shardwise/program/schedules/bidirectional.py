"""Two directions, each with micro-batches, as in Chimera: one fills the bubbles of the other.

S = 4, M = 4, even micro-batches down, odd ones up:

    rank 0   F0.0↓ F0.2↓ ..    F3.1↑ B3.1↑ ...        (stages 0 and 3)
    rank 3   F0.1↑ F0.3↑ ..    F3.0↓ B3.0↓ ...        (stages 3 and 0)

Each direction keeps to the bound of 1F1B, S - s micro-batches alive in stage s: with stages of one rank at
most S + 1 alive on any rank. What runs first where both directions are ready is tried both ways: forwards
first keeps long pipelines full, backwards first ends short ones early.
"""

from __future__ import annotations

from shardwise.plan import Mesh, Plan, direction_of, micro_batches_of
from shardwise.program.actions import Act, Action
from shardwise.program.schedules.greedy import Lane, list_schedule


def bidirectional(plan: Plan, mesh: Mesh) -> list[list[Action]]:
    """Interleave 1F1B down with 1F1B up."""
    rules = (Act.FORWARD, Act.BACKWARD)
    listings = [list_schedule(_lanes(plan, mesh), mesh.positions, first) for first in rules]
    return min(listings, key=lambda listing: listing.makespan).orders


def _lanes(plan: Plan, mesh: Mesh) -> list[Lane]:
    lanes = []
    for direction in mesh.directions:
        own = [m for m in range(micro_batches_of(plan)) if direction_of(plan, m) is direction]
        for stage in range(mesh.stages):
            positions = mesh.member_positions(stage, direction)
            lanes.append(Lane(stage, direction, positions, own, alive=mesh.stages - stage))
    return lanes
