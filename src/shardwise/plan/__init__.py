"""How: the plan, its one-line form, its validation, the cuts into stages and the arrangement of ranks."""

from shardwise.plan.check import check, nearest
from shardwise.plan.cutting import choose_cuts, cut, cuts_from_counts, cuts_from_names
from shardwise.plan.edges import Edge
from shardwise.plan.errors import PlanError
from shardwise.plan.explain import explain
from shardwise.plan.mesh import Mesh, Role, mesh_of
from shardwise.plan.micro_batches import (
    Direction,
    direction_of,
    is_bidirectional,
    micro_batches_of,
    samples_of,
)
from shardwise.plan.plan import Plan
from shardwise.plan.split import Split, Way
from shardwise.plan.stages import shared_parameters, stage_edges, stage_layers

__all__ = [
    "Direction",
    "Edge",
    "Mesh",
    "Plan",
    "PlanError",
    "Role",
    "Split",
    "Way",
    "check",
    "choose_cuts",
    "cut",
    "cuts_from_counts",
    "cuts_from_names",
    "direction_of",
    "explain",
    "is_bidirectional",
    "mesh_of",
    "micro_batches_of",
    "nearest",
    "samples_of",
    "shared_parameters",
    "stage_edges",
    "stage_layers",
]
