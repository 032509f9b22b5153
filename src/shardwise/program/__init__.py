"""When: lowered operations, schedules and their proof, free of torch."""

from shardwise.program.actions import Act, Action, Program
from shardwise.program.build import build_inference, build_program
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
    "build_inference",
    "build_program",
    "lower_stage",
]
