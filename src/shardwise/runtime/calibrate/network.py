"""Time messages and collectives over the very wires that the runtime uses."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.machine import Collective, Curve, Link, Tier
from shardwise.runtime.calibrate.clock import typical
from shardwise.runtime.calibrate.job import measure
from shardwise.runtime.poller import cores
from shardwise.runtime.session import current
from shardwise.runtime.wire import Parcel, Pending, Wire, empty, wire_of

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)
_OVERLAP_BYTES = 4 << 20
_LARGE, _BEYOND_CACHE = 2 << 20, 128 << 20
_FEWEST, _MOST = 3, 200
# The reducer sums no more at once.
_MANY, _PIECE = 6, 16 << 20
# Between two meetings of tiles lie a few tenths of a millisecond of work, or some milliseconds.
_WORK_SECONDS, _TURNS = (3e-4, 1.2e-3, 5e-3), 5
_MEETING_SECONDS = 0.12


def measure_network(transport: str, size: int, seconds: float, sizes: Sequence[int] = SIZES) -> Tier:
    """Return what the network inside this node does between `size` ranks over one transport."""
    function = f"{__name__}:time_network"
    results = measure(function, (tuple(sizes), seconds), size=size, transport=transport, seconds=seconds)
    tables = {
        name: rising([(float(n), max(r[name][n] for r in results)) for n in sorted(results[0][name])])
        for name in results[0]
        if name not in ("overlap", "pairs", "jitter")
    }
    links = {name: _link(table) for name, table in tables.items()}
    pairs = [(float(n), max(r["pairs"][n] for r in results)) for n in sorted(results[0]["pairs"])]
    alone = links["exchange"].seconds(_OVERLAP_BYTES)
    return Tier(
        name="node",
        span=0,
        point_to_point=links["point_to_point"],
        exchange=links["exchange"],
        collectives=tuple(
            Collective(name, size, link)
            for name, link in links.items()
            if name not in ("point_to_point", "exchange")
        ),
        links=max(1, size // 2),
        contention=Curve(tuple((n, max(1.0, t / alone)) for n, t in pairs)) if len(pairs) > 1 else None,
        overlap=min(r["overlap"] for r in results),
        transport=transport,
        crowd=size,
        jitter=_mean_curve([r["jitter"] for r in results]),
    )


def _mean_curve(ranks: Sequence[Sequence[tuple[float, float]]]) -> Curve:
    """Put what all ranks measured together; work that takes no longer than less work is left out."""
    points: list[tuple[float, float]] = []
    for column in zip(*ranks, strict=True):
        x, y = (statistics.fmean(values) for values in zip(*column, strict=True))
        if not points or x > points[-1][0]:
            points.append((x, y))
    return Curve(tuple(points))


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Let no message take longer than a larger one: what contradicts that was an interruption."""
    result: list[tuple[float, float]] = []
    least = float("inf")
    for nbytes, seconds in reversed(points):
        least = min(least, seconds)
        result.append((nbytes, least))
    return tuple(reversed(result))


def _link(table: tuple[tuple[float, float], ...]) -> Link:
    """Summarise a table by its smallest time and its largest rate."""
    rate = max(nbytes / seconds for nbytes, seconds in table)
    return Link(table[0][1], rate, table)


def time_network(arguments: Any) -> dict[str, Any]:
    """Be one rank: time every operation at every size."""
    sizes, seconds = arguments
    session = current()
    wire = wire_of(dist.group.WORLD, range(session.size))
    # Gradients are added up in a group of their own.
    sums = wire_of(dist.new_group(), range(session.size))
    sums.prepare_sums()
    operations = {
        "point_to_point": _ping_pong,
        "exchange": _exchange,
        "all_reduce": _all_reduce,
        "all_reduces": _all_reduces,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
    }
    share = seconds / (len(operations) + 2) / len(sizes)
    found: dict[str, Any] = {}
    for name, prepare in operations.items():
        mine = [n for n in sizes if n <= _PIECE] if name == "all_reduces" else sizes
        over = sums if name == "all_reduces" else wire
        found[name] = _time_sizes(partial(prepare, over, session.rank, session.size), mine, share)
    found["pairs"] = _pairs(wire, session.rank, session.size, share * len(sizes))
    found["overlap"] = _overlap(wire, session.rank)
    found["jitter"] = _jitter(wire)
    return found


def _time_sizes(
    prepare: Callable[[int], Callable[[], float | None]], sizes: Sequence[int], share: float
) -> dict[int, float]:
    """Time rising sizes; leave the largest out when a single one takes longer than its share."""
    found: dict[int, float] = {}
    for nbytes in sizes:
        found[nbytes] = _time(prepare(nbytes), share)
        slow = torch.tensor([found[nbytes] > share])
        dist.broadcast(slow, 0)
        if slow:
            break
    return found


def _time(run: Callable[[], float | None], seconds: float) -> float:
    """Return the typical time of an operation; every rank repeats it equally often."""
    run()
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    wanted = torch.tensor([min(_MOST, max(_FEWEST, int(seconds / max(once, 1e-7))))])
    dist.broadcast(wanted, 0)
    times = []
    for _ in range(int(wanted)):
        start = time.perf_counter()
        own = run()
        times.append(own if own is not None else time.perf_counter() - start)
    return typical(times)


def _buffer(nbytes: int) -> torch.Tensor:
    buffer = empty((max(1, nbytes // 4),), torch.float32, current().device)
    return buffer.fill_(1.0)


def _ping_pong(wire: Wire, rank: int, size: int, nbytes: int) -> Callable[[], float | None]:
    """Send there and back between ranks 0 and 1; half of a round trip is one message."""
    buffer = _buffer(nbytes)

    def run() -> float | None:
        start = time.perf_counter()
        if rank == 0:
            wire.send(Parcel(1, buffer), 0, "ping").wait()
            wire.receive(Parcel(1, buffer), 1, "pong").wait()
        elif rank == 1:
            wire.receive(Parcel(0, buffer), 0, "ping").wait()
            wire.send(Parcel(0, buffer), 1, "pong").wait()
        else:
            return 0.0
        return (time.perf_counter() - start) / 2

    return run


def _exchange(wire: Wire, rank: int, size: int, nbytes: int) -> Callable[[], float | None]:
    """Exchange with the neighbour of one's pair, both ways at once, as a halo exchange does.

    Where ranks share cores all pairs do so at once: whom a message wakes has to wait for a core.
    """
    peer = rank ^ 1
    if peer >= size or (rank > 1 and size <= cores()):
        return lambda: 0.0
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


def _crossing(wire: Wire, peer: int, nbytes: int) -> Callable[[], float | None]:
    arriving, leaving = _buffer(nbytes), _buffer(nbytes)
    line = wire.line([Parcel(peer, arriving)], [Parcel(peer, leaving)], 2, "exchange")

    def run() -> None:
        line.start()
        line.finish()

    return run


def _all_reduce(wire: Wire, rank: int, size: int, nbytes: int) -> Callable[[], float | None]:
    """Sum one tensor after another: gradients, unlike small sums, are in no cache when their turn comes."""
    count = max(1, _BEYOND_CACHE // nbytes) if nbytes >= _LARGE else 1
    tensors = itertools.cycle([_buffer(nbytes) for _ in range(count)])
    return lambda: wire.all_reduce(next(tensors))


def _all_reduces(wire: Wire, rank: int, size: int, nbytes: int) -> Callable[[], float | None]:
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


def _all_gather(wire: Wire, rank: int, size: int, nbytes: int) -> Callable[[], float | None]:
    whole, part = _parts(nbytes, size)
    return lambda: dist.all_gather_into_tensor(whole, part) and None


def _reduce_scatter(wire: Wire, rank: int, size: int, nbytes: int) -> Callable[[], float | None]:
    whole, part = _parts(nbytes, size)
    return lambda: dist.reduce_scatter_tensor(part, whole) and None


def _all_to_all(wire: Wire, rank: int, size: int, nbytes: int) -> Callable[[], float | None]:
    whole, _ = _parts(nbytes, size)
    result = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(result, whole) and None


def _pairs(wire: Wire, rank: int, size: int, seconds: float) -> Mapping[int, float]:
    """Time an exchange while 1, 2, ... pairs of ranks do the same at once."""
    found: dict[int, float] = {}
    pairs = 1
    while 2 * pairs <= size:
        active = rank < 2 * pairs
        run = _crossing(wire, rank ^ 1, _OVERLAP_BYTES) if active else (lambda: 0.0)
        found[pairs] = _time(run, seconds / 4)
        pairs *= 2
    return found


def _overlap(wire: Wire, rank: int) -> float:
    """Return which fraction of an exchange goes on while this rank computes."""
    if rank > 1:
        return 1.0
    run = _crossing(wire, 1 - rank, _OVERLAP_BYTES)
    alone = _repeat(run, 9)
    matrix = torch.ones(256, 256)
    product = torch.empty_like(matrix)
    once = _repeat(lambda: torch.mm(matrix, matrix, out=product), 9)
    rounds = max(1, int(alone / once))

    def compute() -> None:
        for _ in range(rounds):
            torch.mm(matrix, matrix, out=product)

    computing = _repeat(compute, 9)
    arriving, leaving = _buffer(_OVERLAP_BYTES), _buffer(_OVERLAP_BYTES)
    line = wire.line([Parcel(1 - rank, arriving)], [Parcel(1 - rank, leaving)], 3, "overlap")

    def both() -> None:
        line.start()
        compute()
        line.finish()

    together = _repeat(both, 9)
    return min(1.0, max(0.0, (alone + computing - together) / min(alone, computing)))


def _repeat(run: Callable[[], Any], times: int) -> float:
    run()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return typical(found)


def _jitter(wire: Wire) -> list[tuple[float, float]]:
    """Return by which part work takes longer when all ranks meet after each bit of it, for several bits."""
    x, weight = torch.ones(1, 64, 14, 14), torch.ones(64, 64, 3, 3)
    value = torch.zeros(16, dtype=torch.float64)

    def convolve() -> None:
        torch.nn.functional.conv2d(x, weight, padding=1)

    def meetings(count: int, rounds: int, meet: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            for _ in range(rounds):
                convolve()
            if meet:
                wire.all_reduce(value)
        dist.barrier()
        return (time.perf_counter() - start) / count

    once = torch.tensor([_repeat(convolve, 25)])
    dist.broadcast(once, 0)
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
