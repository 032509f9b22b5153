"""What the oracle answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shardwise.oracle.events import Span
from shardwise.oracle.trace import save_trace

TIGHT = 0.9


@dataclass(frozen=True)
class Prediction:
    """Step time, memory and bottleneck of a plan on a machine.

    Args:
        step_seconds: one optimizer step.
        interval: where a measurement is expected to lie.
        batch: samples of one step.
        breakdown: seconds by category, one mapping per rank; the sum is the step.
        peak_bytes_by_category: bytes at the fullest moment, one mapping per rank.
        memory_bytes: what a device has.
        why: finds the bottleneck when it is asked for, because that takes some more simulations.
        timeline: what each rank did when.
        assumed: fields of the machine that entered and have no source.
        flags: how kernel times were obtained, where not measured for the very shape.
        plan: one line, where known.
        machine: its name.
    """

    step_seconds: float
    interval: tuple[float, float]
    batch: int
    breakdown: tuple[Mapping[str, float], ...]
    peak_bytes_by_category: tuple[Mapping[str, float], ...]
    memory_bytes: float
    why: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    timeline: tuple[Span, ...] = field(default=(), repr=False)
    assumed: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    plan: str = ""
    machine: str = ""

    @cached_property
    def bottleneck(self) -> str:
        """Say what limits the step, and what would help most."""
        return self.why() if self.why is not None else ""

    @property
    def samples_per_second(self) -> float:
        """Return the throughput."""
        return self.batch / self.step_seconds if self.step_seconds else float("inf")

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the fullest rank."""
        return int(max((sum(m.values()) for m in self.peak_bytes_by_category), default=0.0))

    @property
    def step_bytes(self) -> int:
        """Return what a step needs beyond what is there before it, on the rank that needs most.

        This is what an allocator's peak over one step shows: activations, gradients and messages, without
        weights, optimizer state and the buffers that are made once.
        """
        return self._most("activations", "gradients", "messages")

    @property
    def working_bytes(self) -> int:
        """Return what a step needs together with the buffers for communication that stay between steps."""
        return self._most("activations", "gradients", "messages", "buffers")

    def _most(self, *names: str) -> int:
        return int(max((sum(m.get(n, 0.0) for n in names) for m in self.peak_bytes_by_category), default=0.0))

    @property
    def verdict(self) -> str:
        """Say whether it fits: `fits`, `tight` (within a tenth of the limit) or `does not fit`."""
        if self.peak_bytes > self.memory_bytes:
            return "does not fit"
        return "tight" if self.peak_bytes > TIGHT * self.memory_bytes else "fits"

    def save_timeline(self, path: str | Path) -> None:
        """Write what each rank does when, for chrome://tracing or Perfetto."""
        save_trace(self.timeline, path)

    def __str__(self) -> str:
        low, high = self.interval
        where = f" on {self.machine}" if self.machine else ""
        what = f"{self.plan}{where}: " if self.plan else ""
        busiest = max(self.breakdown, key=lambda b: sum(b.values()) - b.get("bubble", 0.0), default={})
        total = sum(busiest.values()) or 1.0
        parts = sorted(busiest.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {100 * t / total:.0f} %" for name, t in parts if t > 0.005 * total)
        lines = [
            f"{what}{seconds_text(self.step_seconds)} per step of {self.batch} samples "
            f"({seconds_text(low)} to {seconds_text(high)}), {self.samples_per_second:.4g} samples/s.",
            f"The busiest rank spends {shares}.",
            f"The fullest rank holds {self.peak_bytes / 1e9:.3g} GB of {self.memory_bytes / 1e9:.3g} GB: "
            f"{self.verdict}.",
        ]
        if self.bottleneck:
            lines.append(self.bottleneck)
        if self.flags:
            lines.append(f"Kernel times not measured for the very shapes: {', '.join(self.flags)}.")
        if self.assumed:
            lines.append(f"Assumed, not sourced: {', '.join(self.assumed)}.")
        return " ".join(lines)


def seconds_text(seconds: float) -> str:
    """Return a time with the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
