"""Judge a wait: can it still end, and if not, whose fault is it?

A wait depends on the ranks it waits for and, while those wait too, on the ranks they wait for:

    rank 0 --waits--> rank 1 --waits--> rank 2 (computing)      rank 0 is healthy: only report
    rank 0 --waits--> rank 1 --waits--> rank 0                  nobody can move: end the job
    rank 0 --waits--> rank 1 (asleep, no progress)              rank 1 is stuck: end the job
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

# A rank that has left can send nothing more; what it sent before is on its way for at most this long.
LEFT_GRACE_SECONDS = 5.0


class State(Enum):
    """Say what a rank is doing."""

    BUSY = "busy"
    WAITING = "waiting"
    LEFT = "left"


@dataclass(frozen=True)
class Peer:
    """Hold what is known of another rank."""

    state: State
    waits_for: tuple[int, ...]
    action: str
    idle_seconds: float  # since it last finished an action or used its processor
    silent_seconds: float  # since its heartbeat last changed


@dataclass(frozen=True)
class Judgement:
    """Hold what is to be said of a wait, and whether it ends the job."""

    fatal: bool
    reason: str


def depends_on(me: int, waits_for: Sequence[int], peers: Mapping[int, Peer]) -> list[int]:
    """Return all ranks a wait depends on, nearest first, without this one."""
    seen: dict[int, None] = {}
    frontier = [rank for rank in waits_for if rank != me]
    while frontier:
        rank = frontier.pop(0)
        if rank in seen or rank == me:
            continue
        seen[rank] = None
        peer = peers.get(rank)
        if peer is not None and peer.state is State.WAITING:
            frontier.extend(peer.waits_for)
    return list(seen)


def judge(
    me: int, waits_for: Sequence[int], waited_seconds: float, peers: Mapping[int, Peer], timeout: float
) -> Judgement:
    """Decide whether a wait can still end."""
    reach = depends_on(me, waits_for, peers)
    known = {rank: peers[rank] for rank in reach if rank in peers}
    direct = [rank for rank in waits_for if rank in known]
    for rank in direct:
        peer = known[rank]
        if peer.state is State.LEFT and peer.idle_seconds >= min(LEFT_GRACE_SECONDS, timeout):
            return Judgement(True, f"rank {rank} has already left the job")
    if waited_seconds >= timeout:
        # Every rank reports before it can be waited for; one that never did ended or stopped before.
        for rank in reach:
            if rank not in peers:
                return Judgement(True, f"rank {rank} never gave a sign of life")
        for rank, peer in known.items():
            if peer.silent_seconds >= timeout:
                text = f"rank {rank} gave no sign of life for {peer.silent_seconds:.0f} s"
                return Judgement(True, f"{text}; its last action was: {peer.action}")
        if known and all(peer.idle_seconds >= timeout for peer in known.values()):
            return Judgement(True, _stuck(known))
    return Judgement(False, _alive(known))


def _stuck(known: Mapping[int, Peer]) -> str:
    for rank, peer in known.items():
        if peer.state is State.BUSY:
            return f"rank {rank} made no progress for {peer.idle_seconds:.0f} s in: {peer.action}"
    chain = "; ".join(f"rank {rank}: {peer.action}" for rank, peer in list(known.items())[:4])
    return f"no rank it depends on can move any more ({chain})"


def _alive(known: Mapping[int, Peer]) -> str:
    if not known:
        return "its peers have not reported yet"
    rank, peer = min(known.items(), key=lambda entry: entry[1].idle_seconds)
    doing = "waiting in" if peer.state is State.WAITING else "busy with"
    return f"rank {rank} is alive, {doing}: {peer.action}"
