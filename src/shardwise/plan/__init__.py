"""How: the plan, its one-line form and its validation."""

from shardwise.plan.errors import PlanError
from shardwise.plan.plan import Plan
from shardwise.plan.split import Split, Way

__all__ = ["Plan", "PlanError", "Split", "Way"]
