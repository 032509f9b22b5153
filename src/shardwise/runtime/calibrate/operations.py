"""The messages and collectives that are timed, as one rank of a tier sees them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.runtime.calibrate.clock import typical
from shardwise.runtime.calibrate.hosts import Reach
from shardwise.runtime.session import current
from shardwise.runtime.wire import Parcel, Pending, Wire, empty

OVERLAP_BYTES = 4 << 20
_LARGE, _BEYOND_CACHE = 2 << 20, 128 << 20
_FEWEST, _MOST = 3, 200
# The reducer sums no more at once.
_MANY, _PIECE = 6, 16 << 20
# Between two meetings of tiles lie a few tenths of a millisecond of work, or some milliseconds.
_WORK_SECONDS, _TURNS = (3e-4, 1.2e-3, 5e-3), 5
_MEETING_SECONDS = 0.12
# Stages of a pipeline wait for some milliseconds, or many.
_WAIT_SECONDS, _WAITS = (5e-3, 2e-2), 15

Run = Callable[[], float | None]


@dataclass(frozen=True)
class Bench:
    """One rank of those that measure a tier.

    Args:
        reach: what is measured, and with whom.
        rank: of the job; also the position among the members.
        group: the process group of the members.
        wire: between them.
        sums: a wire for gradients, which are added up in a group of their own.
        crowded: whether ranks share cores.
    """

    reach: Reach
    rank: int
    group: Any
    wire: Wire
    sums: Wire
    crowded: bool

    @property
    def size(self) -> int:
        """Return how many ranks measure together."""
        return len(self.reach.members)

    def sizes(self, name: str, sizes: Sequence[int], seconds: float) -> dict[int, float]:
        """Time an operation at rising sizes; leave the largest out when one takes longer than its share."""
        found: dict[int, float] = {}
        for nbytes in sizes:
            if name == "all_reduces" and nbytes > _PIECE:
                break
            found[nbytes] = self.time(OPERATIONS[name](self, nbytes), seconds)
            slow = torch.tensor([found[nbytes] > seconds])
            dist.broadcast(slow, 0, group=self.group)
            if slow:
                break
        return found

    def time(self, run: Run, seconds: float) -> float:
        """Return the typical time of an operation; every rank repeats it equally often."""
        run()
        start = time.perf_counter()
        run()
        once = time.perf_counter() - start
        wanted = torch.tensor([min(_MOST, max(_FEWEST, int(seconds / max(once, 1e-7))))])
        dist.broadcast(wanted, 0, group=self.group)
        times = []
        for _ in range(int(wanted)):
            start = time.perf_counter()
            own = run()
            times.append(own if own is not None else time.perf_counter() - start)
        return typical(times)

    def pairs(self, seconds: float) -> Mapping[int, float]:
        """Time an exchange while 1, 2, ... pairs of ranks do the same at once."""
        found: dict[int, float] = {}
        for count in self.reach.flows:
            peer = self.reach.peer(self.rank, count)
            run = _crossing(self.wire, peer, OVERLAP_BYTES) if peer is not None else _idle
            found[count] = self.time(run, seconds / 4)
        return found

    def overlap(self) -> float:
        """Return which fraction of an exchange goes on while this rank computes."""
        if self.crowded:
            # Who copies while others compute takes a core from them.
            return 0.0
        peer = self.reach.peer(self.rank)
        if peer is None:
            return 1.0
        alone = _repeat(_crossing(self.wire, peer, OVERLAP_BYTES), 9)
        matrix = torch.ones(256, 256)
        product = torch.empty_like(matrix)
        once = _repeat(lambda: torch.mm(matrix, matrix, out=product), 9)
        rounds = max(1, int(alone / once))

        def compute() -> None:
            for _ in range(rounds):
                torch.mm(matrix, matrix, out=product)

        computing = _repeat(compute, 9)
        arriving, leaving = _buffer(OVERLAP_BYTES), _buffer(OVERLAP_BYTES)
        line = self.wire.line([Parcel(peer, arriving)], [Parcel(peer, leaving)], 3, "overlap")

        def both() -> None:
            line.start()
            compute()
            line.finish()

        together = _repeat(both, 9)
        return min(1.0, max(0.0, (alone + computing - together) / min(alone, computing)))

    def waits(self) -> tuple[float, float]:
        """Return what a wait for one that computes takes of a shared core, and how long waking up takes.

        As many compute as there are cores, each of a pair in turn while the other one waits.
        """
        peer = self.reach.peer(self.rank, len(self.reach.pairs))
        if peer is None or not self.crowded:
            return 0.0, 0.0
        buffer, begins = _buffer(8), any(self.rank == first for first, _ in self.reach.pairs)
        matrix = torch.ones(64, 64)
        waiting, turns = [], []
        for seconds, turn in itertools.product(_WAIT_SECONDS, range(2 * _WAITS)):
            start = time.perf_counter()
            if begins == (turn % 2 == 0):
                end = time.thread_time() + seconds
                while time.thread_time() < end:
                    torch.mm(matrix, matrix)
                self.wire.send(Parcel(peer, buffer), 4, "waited for").wait()
            else:
                before = time.thread_time()
                self.wire.receive(Parcel(peer, buffer), 4, "waiting").wait()
                waiting.append(time.thread_time() - before)
            turns.append(time.perf_counter() - start - seconds)
        spent = statistics.fmean(waiting)
        return spent, max(0.0, statistics.fmean(turns) - spent)

    def jitter(self) -> list[tuple[float, float]]:
        """Return by which part work takes longer when ranks meet after each bit of it, for several bits."""
        x, weight = torch.ones(1, 64, 14, 14), torch.ones(64, 64, 3, 3)
        value = torch.zeros(16, dtype=torch.float64)

        def convolve() -> None:
            torch.nn.functional.conv2d(x, weight, padding=1)

        def meetings(count: int, rounds: int, meet: bool) -> float:
            dist.barrier(group=self.group)
            start = time.perf_counter()
            for _ in range(count):
                for _ in range(rounds):
                    convolve()
                if meet:
                    self.wire.all_reduce(value)
            dist.barrier(group=self.group)
            return (time.perf_counter() - start) / count

        once = torch.tensor([_repeat(convolve, 25)])
        dist.broadcast(once, 0, group=self.group)
        found = []
        for seconds in _WORK_SECONDS:
            rounds, count = max(1, round(seconds / float(once))), round(_MEETING_SECONDS / seconds)
            turns = [
                (meetings(count, rounds, False), meetings(count, rounds, True), meetings(count, 0, True))
                for _ in range(_TURNS)
            ]
            apart, together, meeting = (statistics.median(times) for times in zip(*turns, strict=True))
            found.append((apart, max(0.0, (together - meeting) / apart - 1.0)))
        return found


def _idle() -> float:
    return 0.0


def _repeat(run: Callable[[], Any], times: int) -> float:
    run()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return typical(found)


def _buffer(nbytes: int) -> torch.Tensor:
    buffer = empty((max(1, nbytes // 4),), torch.float32, current().device)
    return buffer.fill_(1.0)


def _ping_pong(bench: Bench, nbytes: int) -> Run:
    """Send there and back between the ranks of the first pair; half of a round trip is one message."""
    wire, peer = bench.wire, bench.reach.peer(bench.rank)
    if peer is None:
        return _idle
    buffer = _buffer(nbytes)
    begins = bench.rank == bench.reach.pairs[0][0]

    def run() -> float:
        start = time.perf_counter()
        if begins:
            wire.send(Parcel(peer, buffer), 0, "ping").wait()
            wire.receive(Parcel(peer, buffer), 1, "pong").wait()
        else:
            wire.receive(Parcel(peer, buffer), 0, "ping").wait()
            wire.send(Parcel(peer, buffer), 1, "pong").wait()
        return (time.perf_counter() - start) / 2

    return run


def _exchange(bench: Bench, nbytes: int) -> Run:
    """Exchange with the other of one's pair, both ways at once, as a halo exchange does.

    Where ranks share cores all pairs do so at once: whom a message wakes has to wait for a core.
    """
    wire, reach = bench.wire, bench.reach
    peer = reach.peer(bench.rank, len(reach.pairs) if bench.crowded else 1)
    if peer is None:
        return _idle
    if nbytes < _LARGE:
        return _crossing(wire, peer, nbytes)
    # What leaves was just written; where it arrives was last touched a step ago, and is in no cache.
    leaving, lines = _buffer(nbytes), []
    for _ in range(max(2, _BEYOND_CACHE // nbytes)):
        lines.append(wire.line([Parcel(peer, _buffer(nbytes))], [Parcel(peer, leaving)], 2, "exchange"))
    turns = itertools.cycle(lines)

    def run() -> float:
        leaving.fill_(2.0)
        line = next(turns)
        start = time.perf_counter()
        line.start()
        line.finish()
        return time.perf_counter() - start

    return run


def _crossing(wire: Wire, peer: int, nbytes: int) -> Run:
    arriving, leaving = _buffer(nbytes), _buffer(nbytes)
    line = wire.line([Parcel(peer, arriving)], [Parcel(peer, leaving)], 2, "exchange")

    def run() -> None:
        line.start()
        line.finish()

    return run


def _all_reduce(bench: Bench, nbytes: int) -> Run:
    """Sum one tensor after another: gradients, unlike small sums, are in no cache when their turn comes."""
    count = max(1, _BEYOND_CACHE // nbytes) if nbytes >= _LARGE else 1
    tensors = itertools.cycle([_buffer(nbytes) for _ in range(count)])
    return lambda: bench.wire.all_reduce(next(tensors))


def _all_reduces(bench: Bench, nbytes: int) -> Run:
    return sums_in_turn(bench.sums, nbytes)


def sums_in_turn(wire: Wire, nbytes: int) -> Run:
    """Sum several tensors, two at a time, as gradients are; return the time of one."""
    count = max(_MANY, _BEYOND_CACHE // nbytes if nbytes >= _LARGE else 0)
    tensors = itertools.cycle([_buffer(nbytes) for _ in range(count)])

    def run() -> float:
        start = time.perf_counter()
        flying: deque[Pending] = deque()
        for _ in range(_MANY):
            if len(flying) == 2:
                flying.popleft().wait()
            flying.append(wire.start_all_reduce(next(tensors), "gradients"))
        while flying:
            flying.popleft().wait()
        return (time.perf_counter() - start) / _MANY

    return run


def _parts(nbytes: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor of `nbytes` (at least one element per rank) and a rank's part of it."""
    whole = _buffer(max(nbytes // size, 4) * size)
    length = whole.numel() // size
    return whole[: length * size], torch.ones(length, device=whole.device)


def _all_gather(bench: Bench, nbytes: int) -> Run:
    whole, part = _parts(nbytes, bench.size)
    return lambda: dist.all_gather_into_tensor(whole, part, group=bench.group) and None


def _reduce_scatter(bench: Bench, nbytes: int) -> Run:
    whole, part = _parts(nbytes, bench.size)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=bench.group) and None


def _all_to_all(bench: Bench, nbytes: int) -> Run:
    whole, _ = _parts(nbytes, bench.size)
    result = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(result, whole, group=bench.group) and None


OPERATIONS: dict[str, Callable[[Bench, int], Run]] = {
    "point_to_point": _ping_pong,
    "exchange": _exchange,
    "all_reduce": _all_reduce,
    "all_reduces": _all_reduces,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
