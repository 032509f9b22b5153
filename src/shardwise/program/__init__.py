"""When: lowered operations, schedules and their proof, free of torch."""

from shardwise.program.lower import lower_stage
from shardwise.program.ops import Compute, Held, Normalise, Op, Regrid, StageProgram

__all__ = ["Compute", "Held", "Normalise", "Op", "Regrid", "StageProgram", "lower_stage"]
