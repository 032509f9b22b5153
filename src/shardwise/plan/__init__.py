"""How: the plan, its one-line form, its validation, the cuts into stages and the arrangement of ranks."""

from shardwise.plan.edges import Edge
from shardwise.plan.errors import PlanError
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

__all__ = [
    "Direction",
    "Edge",
    "Mesh",
    "Plan",
    "PlanError",
    "Role",
    "Split",
    "Way",
    "direction_of",
    "is_bidirectional",
    "mesh_of",
    "micro_batches_of",
    "samples_of",
]
