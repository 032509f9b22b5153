"""A discrete-event simulation of ranks that work, meet, send and receive.

Every rank has a list of events that it goes through in order:

    WORK      compute for some seconds
    MEET      wait until all `peers` have reached the same `key`, then work for some seconds
    SEND      work for some seconds (packing, posting); the message arrives `flight` seconds later
    RECEIVE   wait for the message `key`, then work for some seconds (unpacking)
    LAUNCH    join a collective `key` of `peers` that needs `flight` seconds once all have joined; go on
    WAIT      wait until the collective `key` is done

Collectives of one `line` go one after another, each of which takes it for `taken` seconds. Who waits for
something that is under way already spends that time on it; who waits for others to send or to join has a
bubble.

With more ranks than cores on a node the ranks that work share them evenly, and take turns in the caches;
those that wait look for what they wait for at first, and then use none. With fewer at work than there are
cores, or with others that need less of the memory, each of them may be faster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shardwise.machine import Curve


class Kind(StrEnum):
    """What a rank does in an event."""

    WORK = "work"
    MEET = "meet"
    SEND = "send"
    RECEIVE = "receive"
    LAUNCH = "launch"
    WAIT = "wait"


BUBBLE = "bubble"
_IN_STEP = (Kind.MEET, Kind.RECEIVE, Kind.WAIT)
_TICK = 1e-13


class Event(NamedTuple):
    """One entry of a rank's list; `category` is where its seconds are counted.

    A tuple, as spans are: a step has tens of thousands of them, and they are made several times as fast.
    """

    kind: Kind
    seconds: float
    category: str
    label: str = ""
    key: Hashable = None
    peers: tuple[int, ...] = ()
    flight: float = 0.0
    line: Hashable = None
    taken: float = 0.0


class Span(NamedTuple):
    """What a rank did from `start` to `end`."""

    rank: int
    start: float
    end: float
    category: str
    label: str = ""


class Speed(NamedTuple):
    """How fast a rank works beside more or fewer others than there are cores.

    Args:
        alone: how much faster than with others like itself on all cores while these are idle.
        crowded: how much more of a core's time the same work takes while more ranks than cores work.
        waiting: for how many seconds of a core's time it looks for what it waits for, before it sleeps.
    """

    alone: float = 1.0
    crowded: float = 1.0
    waiting: float = 0.0


class DeadlockError(RuntimeError):
    """Say which rank waits for what when nothing moves any more."""


@dataclass
class _Rank:
    events: Sequence[Event]
    position: int = 0
    clock: float = 0.0
    worked: float = 0.0


def simulate(
    lists: Mapping[int, Sequence[Event]],
    *,
    cores: int = 0,
    ranks_per_node: int = 0,
    paces: Mapping[int, Speed] | None = None,
    jitter: Curve | None = None,
) -> tuple[Span, ...]:
    """Run the event lists of all ranks; return what each did when, waiting included as "bubble".

    Args:
        lists: events by rank.
        cores: cores of a node; 0: every rank has what it needs.
        ranks_per_node: consecutive ranks that share them; 0: all ranks are on one node.
        paces: how fast each rank works beside others; default: as fast as ever.
        jitter: by which part of what they did since they last waited for others ranks that meet are late,
            over the seconds of that.
    """
    simulation = _Simulation(lists, jitter)
    per_node = ranks_per_node or max(len(lists), 1)
    crowd = min(per_node, len(lists))
    known = {rank: (paces or {}).get(rank, Speed()) for rank in lists}
    if cores and (crowd > cores or (crowd > 1 and max(known.values()).alone > 1.0)):
        simulation.run_shared(cores, per_node, known)
    else:
        simulation.run_alone()
    simulation.check_finished()
    return tuple(simulation.spans)


def end_of(spans: Sequence[Span]) -> float:
    """Return when the last rank is done."""
    return max((span.end for span in spans), default=0.0)


class _Simulation:
    def __init__(self, lists: Mapping[int, Sequence[Event]], jitter: Curve | None) -> None:
        self.jitter = jitter
        self.ranks = {rank: _Rank(events) for rank, events in lists.items()}
        self.spans: list[Span] = []
        self.arrived: dict[Hashable, dict[int, float]] = {}
        self.worked: dict[tuple[Hashable, int], float] = {}
        self.mail: dict[Hashable, float] = {}
        self.sent: dict[Hashable, float] = {}
        self.free: dict[Hashable, float] = {}
        self.blocked: dict[Hashable, list[int]] = {}
        self.runnable = list(self.ranks)
        # Meetings of whole groups are over for all of them at once.
        self.groups: dict[int, tuple[tuple[int, ...], frozenset[int]]] = {}
        self.over: dict[tuple[Hashable, frozenset[int]], float] = {}

    def run_alone(self) -> None:
        """Give every rank its own core: clocks advance independently."""
        while self.runnable:
            rank = self.runnable.pop()
            state = self.ranks[rank]
            while state.position < len(state.events):
                event = state.events[state.position]
                if event.kind is Kind.WORK:
                    # Most events: nobody is waited for, and nobody waits.
                    start, state.position = state.clock, state.position + 1
                    end = state.clock = start + event.seconds
                    if end > start:
                        self.spans.append(Span(rank, start, end, event.category, event.label))
                    state.worked = state.worked + end - start
                    continue
                ready = self._ready(rank, event, state.clock)
                if ready is None:
                    break
                end = ready + event.seconds
                self._finish(rank, state, event, ready, end)

    def run_shared(self, cores: int, per_node: int, paces: Mapping[int, Speed]) -> None:
        """Let ranks share cores: all that work on a node advance at one common speed."""
        now = 0.0
        left: dict[int, float] = {}
        began: dict[int, float] = {}
        asleep: list[tuple[float, int]] = []
        sleepers: set[int] = set()
        # Those that look for what they wait for, and at which event each did so last.
        looking: dict[int, float] = {}
        looked: dict[int, int] = {}
        # The same ranks are at work again and again.
        known: dict[tuple[frozenset[int], frozenset[int]], tuple[dict[int, float], dict[int, float]]] = {}
        while True:
            while self.runnable:
                rank = self.runnable.pop()
                state = self.ranks[rank]
                if state.position == len(state.events) or rank in left or rank in sleepers:
                    continue
                ready = self._ready(rank, state.events[state.position], state.clock)
                if ready is not None and ready <= now + _TICK:
                    looking.pop(rank, None)
                    left[rank], began[rank] = state.events[state.position].seconds, now
                    continue
                if paces[rank].waiting and looked.get(rank) != state.position:
                    looked[rank], looking[rank] = state.position, paces[rank].waiting
                if ready is not None:
                    heapq.heappush(asleep, (ready, rank))
                    sleepers.add(rank)
            if not left and not asleep:
                return
            those = frozenset(left), frozenset(looking)
            if those not in known:
                known[those] = _speeds(left, looking, cores, per_node, paces)
            speeds, share = known[those]
            step = min((now + left[r] / speeds[r] for r in left), default=math.inf)
            step = min(step, min((now + looking[r] / share[r] for r in looking), default=math.inf))
            step = min(step, asleep[0][0] if asleep else math.inf)
            for rank in left:
                left[rank] -= (step - now) * speeds[rank]
            for rank in list(looking):
                looking[rank] -= (step - now) * share[rank]
                if looking[rank] <= _TICK:
                    del looking[rank]
            now = step
            while asleep and asleep[0][0] <= now + _TICK:
                rank = heapq.heappop(asleep)[1]
                sleepers.discard(rank)
                self.runnable.append(rank)
            for rank in [r for r, seconds in left.items() if seconds <= _TICK]:
                del left[rank]
                state = self.ranks[rank]
                self._finish(rank, state, state.events[state.position], began[rank], now)
                self.runnable.append(rank)

    def check_finished(self) -> None:
        """Refuse lists in which some rank waits for something that never comes."""
        stuck = [r for r, state in self.ranks.items() if state.position < len(state.events)]
        if stuck:
            state = self.ranks[stuck[0]]
            event = state.events[state.position]
            what = event.label or repr(event.key)
            raise DeadlockError(f"ranks {stuck} wait for ever; rank {stuck[0]} at {event.kind} {what}")

    def _ready(self, rank: int, event: Event, clock: float) -> float | None:
        """Return when an event can begin; None, and remember who waits, if that is not known yet."""
        if event.kind is Kind.MEET:
            here = self.arrived.setdefault(event.key, {})
            if rank not in here:
                here[rank] = clock
                self.worked[event.key, rank] = self.ranks[rank].worked
                self._wake((event.key, rank))
            if rank in (group := self._group(event.peers)):
                return self._together(rank, event.key, group, here)
            if not all(map(here.__contains__, event.peers)):
                # Wait for one of those that are missing: wide groups would wake each other for nothing.
                missing = next(peer for peer in event.peers if peer not in here)
                self.blocked.setdefault((event.key, missing), []).append(rank)
                return None
            there = (rank, *event.peers)
            return max(map(here.__getitem__, there)) + self._late(event.key, there)
        if event.kind is not Kind.RECEIVE and event.kind is not Kind.WAIT:
            return clock
        if event.key in self.mail:
            return max(clock, self.mail[event.key])
        self.blocked.setdefault(event.key, []).append(rank)
        return None

    def _group(self, peers: tuple[int, ...]) -> frozenset[int]:
        """Return the peers as a set; the same tuple comes again and again."""
        known = self.groups.get(id(peers))
        if known is None:
            known = self.groups[id(peers)] = (peers, frozenset(peers))
        return known[1]

    def _together(
        self, rank: int, key: Hashable, group: frozenset[int], here: Mapping[int, float]
    ) -> float | None:
        """Return when a meeting of a group that this rank belongs to is over; None if some are missing."""
        over = self.over.get((key, group))
        if over is None and len(here) >= len(group) and here.keys() >= group:
            over = self.over[key, group] = max(map(here.__getitem__, group)) + self._late(key, group)
            self._wake((key, group))
        if over is None:
            self.blocked.setdefault((key, group), []).append(rank)
        return over

    def _late(self, key: Hashable, group: Iterable[int]) -> float:
        """Return how much later than the last of them a group meets."""
        if self.jitter is None:
            return 0.0
        worked = min(self.worked[key, rank] for rank in group)
        return self.jitter.at(worked) * worked

    def _finish(self, rank: int, state: _Rank, event: Event, start: float, end: float) -> None:
        """Record a finished event and what it causes, and step on."""
        if start > state.clock + _TICK:
            sent = min(max(state.clock, self.sent.get(event.key, start)), start)
            if sent > state.clock:
                self.spans.append(Span(rank, state.clock, sent, BUBBLE, event.label))
            if start > sent:
                self.spans.append(Span(rank, sent, start, event.category, event.label))
        if end > start:
            self.spans.append(Span(rank, start, end, event.category, event.label))
        state.clock, state.position = end, state.position + 1
        # Whoever had to wait for another was in step with it then.
        state.worked = 0.0 if event.kind in _IN_STEP else state.worked + end - start
        if event.kind is Kind.SEND:
            self.sent[event.key] = end
            self.mail[event.key] = end + event.flight
            self._wake(event.key)
        elif event.kind is Kind.LAUNCH:
            here = self.arrived.setdefault(event.key, {})
            here[rank] = end
            self.worked[event.key, rank] = state.worked
            if all(map(here.__contains__, event.peers)):
                joined = max(here.values()) + self._late(event.key, here)
                self.sent[event.key] = joined
                begins = max(joined, self.free.get(event.line, joined))
                self.mail[event.key] = begins + event.flight
                if event.line is not None:
                    self.free[event.line] = begins + event.taken
                self._wake(event.key)

    def _wake(self, key: Hashable) -> None:
        self.runnable += self.blocked.pop(key, [])


def _speeds(
    running: Iterable[int], looking: Iterable[int], cores: int, per_node: int, paces: Mapping[int, Speed]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return how fast those work that do, and which part of a core those have that look for something."""
    nodes: dict[int, tuple[list[int], list[int]]] = {}
    for kind, ranks in enumerate((running, looking)):
        for rank in ranks:
            nodes.setdefault(rank // per_node, ([], []))[kind].append(rank)
    speeds: dict[int, float] = {}
    share: dict[int, float] = {}
    for at_work, waiting in nodes.values():
        each = cores / (len(at_work) + len(waiting))
        share |= dict.fromkeys(waiting, min(1.0, each))
        for rank in at_work:
            speeds[rank] = min(1.0, each / paces[rank].crowded) * _gain(rank, at_work, cores, paces)
    return speeds, share


def _gain(rank: int, ranks: Sequence[int], cores: int, paces: Mapping[int, Speed]) -> float:
    """Return how much faster a rank works beside those at work on its node than beside others like itself.

    Two that slow each other down do so for want of memory bandwidth; beside one that needs less of it, or
    none, half of that is lost.
    """
    mine, others = paces[rank].alone, len(ranks) - 1
    if mine == 1.0 or not others:
        return mine
    usual = (sum(min(mine, paces[other].alone) for other in ranks) - mine) / others
    crowd = min(1.0, others / max(1, cores - 1))
    return mine / (1.0 + crowd * ((mine + usual) / 2 - 1.0))
