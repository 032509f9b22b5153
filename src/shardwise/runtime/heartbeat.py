"""Publish what this rank does, and watch the others while it waits.

A thread writes one small record a second into the job's store. The main thread only sets attributes, so a
beat costs nothing; reading other ranks' records happens only during waits that last. A second thread guards
the first: a store whose process is frozen takes questions and never answers.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.runtime.completer import Outstanding
from shardwise.runtime.failure import end_job
from shardwise.runtime.poller import describe
from shardwise.runtime.processor import Helpers, ticks_of
from shardwise.runtime.watchdog import Judgement, Peer, State, judge

# Less than this share of a core counts as idle: enough for real work, too much for the beating itself.
_BUSY_SHARE = 0.05


@dataclass(slots=True, eq=False)
class _Wait:
    """Hold a wait that lasts: for whom, what, since when, and whether its waiter polls for a verdict."""

    ranks: tuple[int, ...]
    what: object
    since: float
    polled: bool


@dataclass
class _Sighting:
    """Hold a peer's last record and when, by this rank's clock, its counters last moved."""

    record: dict[str, object]
    moved: float
    heard: float


class Heartbeat:
    """Beat for this rank and judge its waits."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        store: Store | None = None,
        keeper: str = "rank 0 or the launcher",
    ) -> None:
        self.rank, self.size, self.timeout_seconds, self.keeper = rank, size, timeout_seconds, keeper
        self._period = min(1.0, timeout_seconds / 8)
        # The thread must not queue behind the main thread's blocking reads on the same connection.
        base: Any = store if store is not None else dist.distributed_c10d._get_default_store()
        self._store = PrefixStore("heartbeat", base.clone())
        self._action: object = None
        self._count = 0
        self._left = False
        self._wait: _Wait | None = None
        self._asleep: _Wait | None = None
        self.outstanding: Callable[[], Outstanding | None] | None = None
        self._verdict: str | None = None
        self._progress = 0
        self._helpers = Helpers()
        self._seen: dict[int, _Sighting] = {}
        self._reported = 0.0
        self._rounds = 0
        self._stopping = threading.Event()
        self._guard = threading.Thread(target=self._watch_store, name="shardwise-guard", daemon=True)
        self._thread = threading.Thread(target=self._run, name="shardwise-heartbeat", daemon=True)
        # Before any message can be waited for: a rank that stops right after must not look unknown.
        self._publish(0.0)
        self._thread.start()
        self._guard.start()

    def beat(self, action: object = None) -> None:
        """Note progress and, if given, what this rank does now: a text, or a callable that returns it."""
        self._count += 1
        if action is not None:
            self._action = action

    def begin_wait(self, ranks: Sequence[int], what: object, polled: bool = True) -> None:
        """Note that this rank waits for others; `polled` waits raise themselves when told to give up."""
        self._verdict = None
        self._wait = _Wait(tuple(ranks) or self._everyone(), what, time.monotonic(), polled)

    def end_wait(self) -> None:
        """Note that the wait is over, which is progress."""
        self._wait = None
        self._count += 1

    @contextmanager
    def waiting(self, ranks: Sequence[int], what: object) -> Iterator[None]:
        """Watch a wait that cannot look for a verdict itself, such as one inside Gloo or NCCL."""
        self.begin_wait(ranks, what, polled=False)
        try:
            yield
        finally:
            self.end_wait()

    def verdict(self) -> str | None:
        """Return why the current wait cannot end, or None while it can."""
        return self._verdict

    def leave(self) -> None:
        """Tell the others that this rank will send nothing more."""
        self._left = True
        with self.waiting((), "leaving the job"):
            self._publish(0.0)

    def stop(self) -> None:
        """Stop beating."""
        self._stopping.set()
        self._thread.join(timeout=5 * self._period)
        self._guard.join(timeout=5 * self._period)

    def _everyone(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def _run(self) -> None:
        last_count, last_cpu, last_time = -1, 0.0, time.monotonic()
        while True:
            now, cpu, count = time.monotonic(), time.process_time() - time.thread_time(), self._count
            used = (cpu - last_cpu) / max(now - last_time, 1e-6)
            if count != last_count or (self._wait is None and self._computes(used)):
                self._progress += 1
            last_count, last_cpu, last_time = count, cpu, now
            self._notice_sleep(used)
            try:
                self._publish(now)
                self._watch(now)
            except (dist.DistError, RuntimeError) as error:
                # Without its store the job is over or ending.
                if (wait := self._current()) is not None:
                    self._give_up(wait, f"{self.keeper}, which keeps the heartbeats, is gone ({error})")
            self._rounds += 1
            if self._stopping.wait(self._period):
                return

    def _watch_store(self) -> None:
        """Give waits up when the other thread is stuck in a question to the store.

        Rounds are counted, not seconds: whoever was stopped as a whole and goes on missed none of them.
        """
        seen, missed = -1, 0
        while not self._stopping.wait(self._period):
            missed = missed + 1 if self._rounds == seen else 0
            seen, silent = self._rounds, missed * self._period
            if silent >= self.timeout_seconds and (wait := self._current()) is not None:
                reason = f"{self.keeper}, which keeps the heartbeats, gave no answer for {silent:.0f} s"
                self._give_up(wait, reason)

    def _computes(self, used: float) -> bool:
        """Tell whether this rank, or a process that works for it, uses a processor."""
        return used > _BUSY_SHARE or (self._asleep is None and self._helpers.share() > _BUSY_SHARE)

    def _notice_sleep(self, used: float) -> None:
        """Note a wait that nobody announced: a rank that computes nothing while futures are outstanding."""
        oldest = self.outstanding() if self.outstanding is not None and used < _BUSY_SHARE else None
        if oldest is None:
            self._asleep = None
        elif self._asleep is None or self._asleep.what != oldest.describe:
            self._asleep = _Wait(tuple(oldest.ranks), oldest.describe, time.monotonic(), polled=False)

    def _current(self) -> _Wait | None:
        return self._wait if self._wait is not None else self._asleep

    def _publish(self, now: float) -> None:
        wait = self._current()
        state = State.LEFT if self._left else State.WAITING if wait is not None else State.BUSY
        record = {
            "state": state.value,
            "waits_for": list(wait.ranks) if wait is not None else [],
            "action": self._doing(wait),
            "progress": self._progress,
            "tick": now,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._store.set(str(self.rank), json.dumps(record))

    def _doing(self, wait: _Wait | None) -> str:
        """Return what this rank waits for, if it does, and the action that is part of."""
        action = "" if self._action is None else describe(self._action)
        if wait is None:
            return action or "the user's program"
        return f"{describe(wait.what)}{f' during {action}' * bool(action)}"

    def _watch(self, now: float) -> None:
        wait = self._current()
        if wait is None or now - wait.since < self._period:
            self._seen.clear()
            return
        peers = self._look(now)
        waited = now - wait.since
        ranks = wait.ranks
        if self._left:
            # Whoever leaves waits only for those that have not left yet.
            ranks = tuple(rank for rank in ranks if rank in peers and peers[rank].state is not State.LEFT)
        found = judge(self.rank, ranks, waited, peers, self.timeout_seconds)
        if found.fatal:
            self._give_up(wait, found.reason)
        elif waited > self.timeout_seconds / 2 and now - self._reported > self.timeout_seconds / 2:
            self._report(wait, waited, found, now)

    def _look(self, now: float) -> dict[int, Peer]:
        # Only keys that exist: reading a missing one would block until it appears.
        ranks = [rank for rank in self._everyone() if self._store.check([str(rank)])]
        peers: dict[int, Peer] = {}
        for rank, text in zip(ranks, self._store.multi_get([str(r) for r in ranks]), strict=True):
            record = json.loads(text)
            record["cpu"] = _cpu_ticks(record)
            seen = self._seen.get(rank)
            if seen is None:
                seen = self._seen[rank] = _Sighting(record, now, now)
            if record["tick"] != seen.record["tick"]:
                seen.heard = now
            elif record["state"] == State.BUSY.value and record["cpu"] != seen.record["cpu"]:
                # Its heartbeat is starved by a computation that holds the interpreter; it does compute.
                seen.heard = seen.moved = now
            if record["progress"] != seen.record["progress"] or record["state"] != seen.record["state"]:
                seen.moved = now
            seen.record = record
            peers[rank] = Peer(
                State(record["state"]),
                tuple(record["waits_for"]),
                record["action"],
                now - seen.moved,
                now - seen.heard,
            )
        return peers

    def _report(self, wait: _Wait, waited: float, found: Judgement, now: float) -> None:
        self._reported = now
        text = f"shardwise: {self._doing(wait)}: waiting for {waited:.0f} s; {found.reason}"
        print(text, file=sys.stderr, flush=True)

    def _give_up(self, wait: _Wait, reason: str) -> None:
        if wait is not self._current() or self._verdict is not None:
            return
        if wait.polled:
            # Whoever polls names what it waits for, but does not know the action that is part of.
            known = self._action is not None
            self._verdict = f"during {describe(self._action)}: {reason}" if known else reason
            return
        self._verdict = reason
        waited = time.monotonic() - wait.since
        text = f"shardwise: {self._doing(wait)}: gave up after {waited:.1f} s: {reason}"
        print(text, file=sys.stderr, flush=True)
        end_job(1)


def _cpu_ticks(record: dict[str, Any]) -> int | None:
    """Return the processor time of a rank on this node, or None where it cannot be read."""
    return ticks_of(record["pid"]) if record["host"] == socket.gethostname() else None
