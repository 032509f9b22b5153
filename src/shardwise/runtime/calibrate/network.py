"""Time messages and collectives over the very wires that the runtime uses, and put them into tiers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.machine import Collective, Curve, Link, Tier
from shardwise.runtime.calibrate.hosts import NODE, Reach, host_name, reaches
from shardwise.runtime.calibrate.job import measure
from shardwise.runtime.calibrate.operations import OPERATIONS, OVERLAP_BYTES, Bench
from shardwise.runtime.poller import cores
from shardwise.runtime.session import current
from shardwise.runtime.wire import wire_of

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)


def measure_network(
    transport: str, size: int, seconds: float, sizes: Sequence[int] = SIZES
) -> tuple[Tier, ...]:
    """Return what the network does between ranks, `size` of them on a node, over one transport.

    Ranks that are started for this share the node, which has one tier. The ranks of a running job may have
    several nodes; then there is one tier inside a node and one between nodes.
    """
    function = f"{__name__}:time_network"
    results = measure(function, (tuple(sizes), seconds), size=size, transport=transport, seconds=seconds)
    tiers = []
    for i, reach in enumerate(results[0][0]):
        members = [found[i] for _, found in results if found[i] is not None]
        tiers.append(_tier(reach, members, transport, size))
    return tuple(tiers)


def _tier(reach: Reach, ranks: Sequence[dict[str, Any]], transport: str, crowd: int) -> Tier:
    """Put what all ranks measured together."""
    tables = {
        name: rising([(float(n), max(r[name][n] for r in ranks)) for n in sorted(ranks[0][name])])
        for name in OPERATIONS
    }
    links = {name: _link(table) for name, table in tables.items()}
    pairs = [(float(n), max(r["pairs"][n] for r in ranks)) for n in sorted(ranks[0]["pairs"])]
    alone = links["exchange"].seconds(OVERLAP_BYTES)
    return Tier(
        name=reach.name,
        span=reach.span,
        point_to_point=links["point_to_point"],
        exchange=links["exchange"],
        collectives=tuple(
            Collective(name, len(reach.members), link)
            for name, link in links.items()
            if name not in ("point_to_point", "exchange")
        ),
        links=max(1, len(reach.pairs)) if reach.name == NODE else 1,
        contention=Curve(tuple((n, max(1.0, t / alone)) for n, t in pairs)) if len(pairs) > 1 else None,
        overlap=min(r["overlap"] for r in ranks),
        transport=transport,
        crowd=crowd,
        jitter=_mean_curve([r["jitter"] for r in ranks]) if "jitter" in ranks[0] else None,
        waiting_seconds=statistics.fmean(r["waits"][0] for r in ranks),
        waking_seconds=statistics.fmean(r["waits"][1] for r in ranks),
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


def time_network(arguments: Any) -> tuple[tuple[Reach, ...], list[dict[str, Any] | None]]:
    """Be one rank: return the tiers, and what it found about each; None where it was not asked."""
    sizes, seconds = arguments
    session = current()
    told: list[Any] = [None] * session.size
    dist.all_gather_object(told, (host_name(), cores()))
    hosts = [host for host, _ in told]
    crowded = hosts.count(hosts[0]) > told[0][1]
    tiers = reaches(hosts)
    world = wire_of(dist.group.WORLD, range(session.size))
    results: list[dict[str, Any] | None] = []
    for reach in tiers:
        members = list(reach.members)
        # Every rank of the job must be there when a group is made.
        group = dist.group.WORLD if len(members) == session.size else dist.new_group(members)
        apart = dist.new_group(members)
        found: dict[str, Any] | None = None
        if session.rank in members:
            wires = (wire_of(group, members), wire_of(apart, members))
            bench = Bench(reach, session.rank, group, *wires, crowded)
            # Only that of neighbours counts: they meet most often.
            found = _time_tier(bench, sizes, seconds / len(tiers), jitter=reach is tiers[0])
        results.append(found)
        # The others wait as steps do: who is not asked must not take a core from those that are.
        world.all_reduce(torch.zeros(1, device=session.device))
    return tiers, results


def _time_tier(bench: Bench, sizes: Sequence[int], seconds: float, jitter: bool) -> dict[str, Any]:
    """Time every operation at every size."""
    bench.sums.prepare_sums()
    share = seconds / (len(OPERATIONS) + 2) / len(sizes)
    found: dict[str, Any] = {name: bench.sizes(name, sizes, share) for name in OPERATIONS}
    found["pairs"] = bench.pairs(share * len(sizes))
    found["overlap"] = bench.overlap()
    found["waits"] = bench.waits()
    if jitter:
        found["jitter"] = bench.jitter()
    return found
