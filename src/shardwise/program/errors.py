"""The error of a program that would not run."""

from __future__ import annotations

from shardwise.program.actions import Action


class ProgramError(ValueError):
    """Say which rank fails at which action, and for want of whom."""

    def __init__(self, rank: int, action: Action | None, reason: str, peer: int | None = None) -> None:
        self.rank, self.action, self.reason, self.peer = rank, action, reason, peer
        at = f", {action.act} {action}" if action is not None else ""
        whom = f" (peer: rank {peer})" if peer is not None else ""
        super().__init__(f"rank {rank}{at}: {reason}{whom}")
