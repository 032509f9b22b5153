"""When: lowered operations, schedules and their proof, free of torch."""

from shardwise.program.actions import Act, Action, Program
from shardwise.program.choices import candidates
from shardwise.program.lower import lower_stage
from shardwise.program.ops import Compute, Held, Normalise, Op, Regrid, StageProgram

__all__ = [
    "Act",
    "Action",
    "Compute",
    "Held",
    "Normalise",
    "Op",
    "Program",
    "Regrid",
    "StageProgram",
    "candidates",
    "lower_stage",
]
