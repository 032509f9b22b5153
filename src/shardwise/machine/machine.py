"""The machine as data: what a device can do, what a node holds, how nodes are connected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.machine import toml
from shardwise.machine.curve import Curve, Points
from shardwise.machine.errors import MachineError
from shardwise.machine.network import Link, Tier

PRESETS = Path(__file__).parent / "presets"
ASSUMED = "assumed"


@dataclass(frozen=True)
class Device:
    """Describe what one rank computes on: a GPU, a socket, a core.

    Args:
        name: as its maker calls it.
        peak_flops: operations per second by dtype; multiply and add count as two.
        memory_bytes: what a rank may use.
        memory_bandwidth: bytes read or written per second.
        baseline_bytes: what the framework takes before the first tensor.
        overhead_forward_seconds, overhead_backward_seconds: software cost of one operator.
        efficiency: fraction of the peak over the flops of one call, by layer kind (`convolution`) or by
            kind and direction (`convolution/backward_weight`); kinds without a curve are memory-bound.
        update_bytes_per_second: bytes of parameters that the optimizer updates per second; 0: a sixth of
            the memory bandwidth.
        overhead_segment_forward_seconds, overhead_segment_backward_seconds: software cost of entering and
            leaving the computations between two communications.
        overhead_gradient_seconds: software cost of noting that a gradient that is to be summed is there.
        update: how long updating one parameter of so many bytes takes, where that was measured.
        alone_speedup: how much faster a rank computes while the other cores of its node are idle.
        update_alone_speedup: how much faster it updates weights then.
        threads: computing threads of one rank.
        host: whether messages are copied by the cores that also compute.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    baseline_bytes: float = 0.0
    overhead_forward_seconds: float = 0.0
    overhead_backward_seconds: float = 0.0
    efficiency: Mapping[str, Curve] = field(default_factory=dict)
    update_bytes_per_second: float = 0.0
    threads: int = 1
    host: bool = False
    overhead_segment_forward_seconds: float = 0.0
    overhead_segment_backward_seconds: float = 0.0
    overhead_gradient_seconds: float = 0.0
    update: Link | None = None
    alone_speedup: float = 1.0
    update_alone_speedup: float = 1.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bandwidth"):
            if getattr(self, name) <= 0:
                raise MachineError(f"device.{name}", f"{getattr(self, name)} found", "it must be positive")
        if not self.peak_flops:
            raise MachineError("device.peak_flops", "empty", "give at least float32")

    def update_seconds(self, sizes: Iterable[float]) -> float:
        """Return how long the optimizer needs for parameters of these bytes."""
        if self.update is not None:
            return sum(map(self.update.seconds, sizes))
        return sum(sizes) / (self.update_bytes_per_second or self.memory_bandwidth / 6)

    def updating(self, points: Points, alone: float) -> Device:
        """Return a device that updates parameters of these sizes in these seconds, smaller ones as before."""
        link = Link.measured(self.update, points)
        return dataclasses.replace(
            self,
            update_bytes_per_second=link.bytes_per_second,
            update=link,
            update_alone_speedup=max(1.0, alone),
        )

    def curve(self, kind: str, direction: str) -> Curve | None:
        """Return the fraction of the peak over the flops of a call; nothing for kinds that only move bytes.

        A transposed convolution without a curve of its own computes what a convolution does backwards.
        """
        known = self.efficiency
        found = known.get(f"{kind}/{direction}") or known.get(kind)
        if found is None and kind == "transposed convolution":
            mirrored = {"forward": "backward_input", "backward_input": "forward"}.get(direction, direction)
            return self.curve("convolution", mirrored)
        return found

    def peak(self, dtype: str) -> float:
        """Return the peak of a dtype; of the widest known one if the dtype is not listed."""
        if dtype in self.peak_flops:
            return self.peak_flops[dtype]
        return min(self.peak_flops.values())


@dataclass(frozen=True)
class Node:
    """Describe what shares one operating system: `devices` ranks and `cores` that serve them."""

    devices: int = 1
    cores: int = 1

    def __post_init__(self) -> None:
        for name in ("devices", "cores"):
            if getattr(self, name) < 1:
                raise MachineError(f"node.{name}", f"{getattr(self, name)} found", "at least 1")


@dataclass(frozen=True)
class Machine:
    """Describe a machine; load it by a preset's name or from a TOML file.

    Args:
        name: short, as in `--machine name`.
        device, node: see there.
        tiers: the network from the inside out.
        transport: which tiers count, where several transports were measured; "" takes all.
        input_bytes_per_second: how fast samples reach one node; 0: never a limit.
        nodes: how many there are; 0: any number.
        crowd: ranks that share a node, where tiers were measured with several numbers of them.
        sources: where each number comes from, by dotted field name; a prefix speaks for all below it.
            A field without an entry is `assumed`.
    """

    name: str
    device: Device
    node: Node
    tiers: tuple[Tier, ...]
    transport: str = ""
    input_bytes_per_second: float = 0.0
    nodes: int = 0
    crowd: int = 0
    description: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.network:
            known = sorted({tier.transport for tier in self.tiers})
            raise MachineError("tiers", f"none for transport {self.transport!r}", f"there are {known}")
        if self.network[-1].span != 0:
            raise MachineError("tiers", "the last tier does not reach all ranks", "give it span = 0")

    @property
    def network(self) -> tuple[Tier, ...]:
        """Return the tiers of the chosen transport, as measured with at least so many ranks on a node."""
        mine = tuple(t for t in self.tiers if not self.transport or t.transport in ("", self.transport))
        crowds = sorted({tier.crowd for tier in mine})
        if len(crowds) < 2:
            return mine
        chosen = next((crowd for crowd in crowds if crowd >= self.crowd), crowds[-1])
        return tuple(tier for tier in mine if tier.crowd == chosen)

    def tier(self, ranks: Iterable[int]) -> Tier:
        """Return the innermost tier through which all these ranks reach each other."""
        members = list(ranks)
        first, last = min(members, default=0), max(members, default=0)
        for tier in self.network:
            if tier.span == 0 or first // tier.span == last // tier.span:
                return tier
        return self.network[-1]

    def with_transport(self, transport: str) -> Machine:
        """Return the machine with the network figures of another transport."""
        return dataclasses.replace(self, transport=transport)

    def updating(self, points: Points, alone: float) -> Machine:
        """Return a machine whose devices update parameters of these sizes in these seconds."""
        if not points:
            return self
        return dataclasses.replace(self, device=self.device.updating(points, alone))

    def summing(self, known: Mapping[tuple[str, int], Points]) -> Machine:
        """Return a machine that adds gradients of these sizes up in these seconds, smaller ones as before.

        Args:
            known: sizes and seconds, by transport and how many ranks of a node did so.
        """
        # Of tiers that were measured alike the first is that of neighbours.
        open_, tiers = dict(known), []
        for tier in self.tiers:
            points = open_.pop((tier.transport, tier.crowd), None)
            tiers.append(tier if points is None else tier.summing(tier.crowd, points))
        return dataclasses.replace(self, tiers=tuple(tiers)) if known else self

    def with_crowd(self, ranks: int) -> Machine:
        """Return the machine with the network figures for so many ranks that share a node."""
        return dataclasses.replace(self, crowd=ranks)

    @property
    def devices(self) -> int:
        """Return how many devices all nodes have together; 0: any number."""
        return self.nodes * self.node.devices

    @property
    def most_ranks(self) -> int:
        """Return how many ranks there can be; 0: any number, as where they share the cores of hosts."""
        return 0 if self.device.host else self.devices

    def ranks_per_node(self, ranks: int) -> int:
        """Return how many of so many ranks share a node."""
        return max(self.node.devices, -(-ranks // self.nodes)) if self.nodes else self.node.devices

    def memory_per_rank(self, ranks: int) -> float:
        """Return what each of so many ranks has; where they outnumber the devices of a host they share."""
        crowd = min(ranks, self.ranks_per_node(ranks))
        share = min(1.0, self.node.devices / crowd) if self.device.host else 1.0
        return self.device.memory_bytes * share

    def shared_cores(self, ranks: int) -> int:
        """Return the cores for which so many ranks take turns; 0: each of them has one of its own."""
        together = self.ranks_per_node(ranks)
        if not self.device.host or min(ranks, together) <= self.node.cores:
            return 0
        return -(-ranks // together) * self.node.cores

    @property
    def crowded(self) -> bool:
        """Tell whether more ranks than cores share a node and take turns."""
        return self.device.host and self.crowd > self.node.cores

    @property
    def jitter(self) -> Curve | None:
        """Return by which part neighbours that meet are late, over the seconds that they worked."""
        return self.tier((0, 1)).jitter

    @property
    def waiting_seconds(self) -> float:
        """Return for how long a rank that shares cores looks for what it waits for, before it sleeps."""
        return self.tier((0, 1)).waiting_seconds if self.crowded else 0.0

    @property
    def waking_seconds(self) -> float:
        """Return how long it takes until such a rank goes on when what it waits for has come."""
        return self.tier((0, 1)).waking_seconds if self.crowded else 0.0

    def sum_seconds(
        self, tier: Tier, ranks: int, nbytes: float, flows: int = 1, *, many: bool = False
    ) -> float:
        """Return what each of some ranks works while they add a tensor up, on its own or one of `many`.

        Where more ranks than cores measured it, each of them had a core for only a part of the time.
        """
        name = "all_reduces" if many and tier.measured("all_reduces", ranks) else "all_reduce"
        seconds = tier.collective_seconds(name, ranks, nbytes, flows)
        measured = tier.measured(name, ranks)
        if measured is None or not self.device.host:
            return seconds
        return seconds * min(1.0, self.node.cores / min(measured.ranks, tier.crowd or measured.ranks))

    def leaves_node(self, source: int, target: int) -> bool:
        """Tell whether a message between two ranks leaves the node, whose links others share then."""
        span = self.network[0].span
        return span > 0 and source // span != target // span

    def exchange_seconds(self, tier: Tier, nbytes: float, flows: int = 1) -> float:
        """Return what each of two ranks works while they exchange messages; see `sum_seconds`."""
        crowded = self.device.host and tier.crowd > self.node.cores
        return tier.exchange_seconds(nbytes, flows) * (self.node.cores / tier.crowd if crowded else 1.0)

    def with_ranks_per_node(self, ranks: int) -> Machine:
        """Return the machine with each node's devices shared out evenly over so many ranks."""
        if ranks < 1:
            raise MachineError("node.devices", f"{ranks} ranks per node asked for", "at least 1")
        share = self.node.devices / ranks
        device = self.device
        divided = dataclasses.replace(
            device,
            peak_flops={dtype: peak * share for dtype, peak in device.peak_flops.items()},
            memory_bytes=device.memory_bytes * share,
            memory_bandwidth=device.memory_bandwidth * share,
            update_bytes_per_second=device.update_bytes_per_second * share,
            update=None if device.update is None else device.update.scaled(1 / share),
            threads=max(1, int(device.threads * share)),
        )
        inner = self.node.devices
        tiers = tuple(dataclasses.replace(t, span=ranks * t.span // inner) for t in self.tiers)
        node = dataclasses.replace(self.node, devices=ranks)
        return dataclasses.replace(self, device=divided, node=node, tiers=tiers)

    def source(self, field: str) -> str:
        """Return where a number comes from; `assumed` if nobody said."""
        name = field
        while name:
            if name in self.sources:
                return self.sources[name]
            name = name.rpartition(".")[0]
        return self.sources.get("default", ASSUMED)

    def assumed(self, fields: Iterable[str]) -> tuple[str, ...]:
        """Return those of the given fields that no source backs."""
        return tuple(f for f in sorted(set(fields)) if self.source(f).startswith(ASSUMED))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of the machines that come with shardwise."""
        return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))

    @staticmethod
    def load(name_or_path: str | Path | Machine) -> Machine:
        """Read a machine from a TOML file, or take a preset by its name."""
        if isinstance(name_or_path, Machine):
            return name_or_path
        path = Path(name_or_path)
        if path.suffix != ".toml":
            preset = PRESETS / f"{name_or_path}.toml"
            if not preset.is_file():
                known = ", ".join(Machine.presets())
                raise MachineError(
                    "name", f"{str(name_or_path)!r} is no preset", f"use a .toml file or {known}"
                )
            path = preset
        if not path.is_file():
            raise MachineError("path", f"there is no file {path}", "`shardwise calibrate -o FILE` writes one")
        return toml.read(Machine, path)

    def save(self, path: str | Path) -> None:
        """Write the machine as TOML."""
        toml.write(self, Path(path))

    def replace(self, **changes: Any) -> Machine:
        """Return the machine with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        device, network = self.device, self.network
        lines = [
            f"{self.name}: {self.node.devices} x {device.name} per node, "
            f"{device.peak('float32') / 1e12:.3g} Tflop/s and {device.memory_bytes / 1e9:.3g} GB each"
        ]
        lines += [f"  {_describe(tier)}" for tier in network]
        return "\n".join(lines)


def _describe(tier: Tier) -> str:
    latency = tier.point_to_point.seconds(8)
    large = 16 << 20
    rate = large / tier.point_to_point.seconds(large)
    what = f" ({tier.transport})" if tier.transport else ""
    return f"{tier.name}{what}: {latency * 1e6:.3g} us, {rate / 1e9:.3g} GB/s"
