"""Prove that a program runs to its end: everything matches, nothing is used early, nobody waits for ever.

The proof walks the very lists that the executor runs, in time proportional to their length:

1. every rank for itself (`local`): it plays only its own stages, in an order in which all is there in time;
2. every pair of groups (`matching`): each message has both ends, once on every rank of both groups, and
   every rank that holds a stage reduces it, all of them in one common order;
3. all ranks together (`progress`): the lists are run. A send never waits; a receive waits until all ranks
   of the sending group have sent; a computation of a group of several ranks, which holds collective
   communication, waits for all of them to arrive at it; STEP waits for all sums;
4. every channel (`order`): messages are received in the order in which they are sent.
"""

from __future__ import annotations

from shardwise.program.actions import Program
from shardwise.program.errors import ProgramError
from shardwise.program.proof.local import prove_local
from shardwise.program.proof.matching import prove_matching
from shardwise.program.proof.order import prove_order
from shardwise.program.proof.progress import prove_progress


def prove(program: Program) -> None:
    """Raise a `ProgramError` with rank, action and peer unless the program is sound."""
    if len(program.actions) != program.ranks:
        reason = f"{len(program.actions)} lists for {program.ranks} ranks"
        raise ProgramError(len(program.actions), None, reason)
    prove_local(program)
    prove_matching(program)
    prove_progress(program)
    prove_order(program)


__all__ = ["ProgramError", "prove", "prove_order"]
