"""Measured kernel times, kept in a file per device, and what to answer for shapes that were not measured."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.geometry.access import reach
from shardwise.graph import Source
from shardwise.machine.curve import Points
from shardwise.oracle.kernels import WEIGHTED, Direction, Estimate, KernelTimes, Roofline, Task
from shardwise.oracle.lateness import Meetings, Met, lateness
from shardwise.oracle.moves import REDUCE, UPDATE, Move

INTERPOLATED = "interpolated"
_VERSION = 13
# Copies have one direction only.
_ONCE = Direction.FORWARD.value


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one task, with their spreads, and what it computes and moves.

    `alone` has how much shorter each is while the other cores are idle, `crowded` how much more of a core's
    time each takes where more ranks than cores take turns, wait, and find less of their own in its caches.
    """

    op: str
    seconds: Mapping[str, float]
    spread: Mapping[str, float]
    flops: Mapping[str, float]
    nbytes: Mapping[str, float]
    room: Mapping[str, float] = field(default_factory=dict)
    family: str = ""
    alone: Mapping[str, float] = field(default_factory=dict)
    crowded: Mapping[str, float] = field(default_factory=dict)

    def estimate(self, direction: str, seconds: float, spread: float, flag: str = "") -> Estimate:
        """Return a time with what is known of it on idle and on crowded cores."""
        return Estimate(
            seconds, spread, flag, self.alone.get(direction, 1.0), self.crowded.get(direction, 1.0)
        )


def key_of(task: Task) -> str:
    """Return a text that is equal for tasks that run the same kernel on the same local shapes."""
    operands = task.layer.operands
    shapes = []
    for operand, held, want in zip(operands, task.held, task.wants, strict=True):
        shape = "x".join(map(str, want.shape))
        crop = "" if held == want else "/" + "x".join(map(str, held.shape))
        shapes.append(f"{operand.role}:{operand.spec.dtype}[{shape}{crop}]")
    settings = ",".join(f"{k}={_plain(v)}" for k, v in sorted(task.layer.attributes.items()))
    out = "x".join(map(str, task.out.shape))
    ways = {"shared": task.shared, "rectifying": task.rectifies, "landing": task.landing}
    words = "".join(f"{word} " for word, is_so in ways.items() if is_so)
    return f"{words}{task.layer.op}({settings}) {' '.join(shapes)} -> [{out}]{_borders(task)}"


def family_of(task: Task) -> str:
    """Return a text that is equal for tasks that do the same to more or fewer samples or pixels."""
    kinds = zip(task.layer.operands, task.wants, strict=True)
    weights = ["x".join(map(str, want.shape)) for o, want in kinds if o.origin is Source.PARAMETER]
    channels = task.wants[0].shape[1:2] if task.wants else ()
    settings = ",".join(f"{k}={_plain(v)}" for k, v in sorted(task.layer.attributes.items()))
    return f"{_op(task)}({settings}) {weights} {channels}"


def _borders(task: Task) -> str:
    """Say where the output reaches over the border of the image, since padding is done differently there."""
    if not task.layer.operands:
        return ""
    operand = task.layer.operands[0]
    ranges = reach(operand.access, operand.spec.shape, task.out)
    over = [(max(0, -lo), max(0, hi - n)) for (lo, hi), n in zip(ranges, operand.spec.shape, strict=True)]
    return f" pads {over}" if any(a or b for a, b in over) else ""


def _plain(value: Any) -> str:
    return re.sub(r"\s+", "", repr(value))


@dataclass
class Profile:
    """Answer from measurements; what was not measured is scaled from the nearest of the same operator.

    Args:
        device: name of what was measured.
        threads: computing threads of a rank.
        fallback: asked for operators that were never measured.
        entries: measurements by key.
        refused: why some tasks cannot be measured, by key.
        meetings: of ranks that did the same and met where programs do.
    """

    device: str
    threads: int
    fallback: KernelTimes
    entries: dict[str, Measured] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    meetings: Meetings = field(default_factory=dict)
    _by_op: dict[str, list[Measured]] = field(default_factory=dict, repr=False)

    def add(self, key: str, measured: Measured) -> None:
        """Add a measurement, in place of what was known."""
        if key in self.entries:
            self._by_op[self.entries[key].op].remove(self.entries[key])
        self.entries[key] = measured
        self._by_op.setdefault(measured.op, []).append(measured)

    def lateness(self) -> Points:
        """Return by which part of what they did ranks that meet are late, over the seconds of that."""
        return lateness(self.meetings)

    def updates(self) -> tuple[Points, float]:
        """Return how long updates of parameters of some sizes take, and how much shorter they are alone."""
        known = {m.nbytes[_ONCE]: m for m in self._by_op.get(UPDATE, ())}
        points = tuple((nbytes, known[nbytes].seconds[_ONCE]) for nbytes in sorted(known))
        together = sum(seconds for _, seconds in points)
        alone = sum(m.seconds[_ONCE] / m.alone.get(_ONCE, 1.0) for m in known.values())
        return points, together / alone if alone else 1.0

    def sums(self) -> dict[tuple[str, int], Points]:
        """Return how long sums of gradients of some sizes take, by transport and number of ranks."""
        found: dict[tuple[str, int], Points] = {}
        for m in sorted(self._by_op.get(REDUCE, ()), key=lambda m: m.nbytes[_ONCE]):
            transport, _, ranks = m.family.partition(" ")
            where = (transport, int(ranks))
            found[where] = (*found.get(where, ()), (m.nbytes[_ONCE], m.seconds[_ONCE]))
        return found

    def knows(self, key: str, crowded: bool = False) -> bool:
        """Tell whether a computation was measured, on crowded cores too if so asked, or cannot be."""
        entry = self.entries.get(key)
        return key in self.refused or (entry is not None and (not crowded or bool(entry.crowded)))

    def seconds(self, task: Task, direction: Direction) -> Estimate:
        """Return the measured time, else a scaled one, else the fallback's; the flag says which."""
        if task.out.empty:
            return Estimate(0.0)
        entry = self.entries.get(key_of(task))
        if entry is not None and direction in entry.seconds:
            return entry.estimate(direction, entry.seconds[direction], entry.spread.get(direction, 0.0))
        near = self._nearest(task, direction)
        if not near:
            return self.fallback.seconds(task, direction)
        points = [(self._known_cost(m, task, direction), m.seconds[direction]) for m in near]
        seconds = _between(points, self._cost(task, direction))
        doubt = near[0].spread.get(direction, 0.0) / near[0].seconds[direction]
        return near[0].estimate(direction, seconds, (doubt + 0.1) * seconds, INTERPOLATED)

    def moving(self, move: Move) -> Estimate:
        """Return the measured time of copies and additions, else one scaled by bytes."""
        entry = self.entries.get(move.key)
        if entry is not None:
            return entry.estimate(_ONCE, entry.seconds[_ONCE], entry.spread[_ONCE])
        known = [m for m in self._by_op.get(move.kind, ()) if m.seconds[_ONCE] > 0]
        if not known or not move.nbytes:
            return self.fallback.moving(move)
        near = min(known, key=lambda m: abs(math.log(m.nbytes[_ONCE] / move.nbytes)))
        seconds = near.seconds[_ONCE] * move.nbytes / near.nbytes[_ONCE]
        return near.estimate(_ONCE, seconds, 0.1 * seconds, INTERPOLATED)

    def room(self, task: Task, direction: Direction) -> float:
        """Return what was allocated when it was measured, else what the fallback says."""
        entry = self.entries.get(key_of(task))
        if entry is not None and direction in entry.room:
            return entry.room[direction]
        return self.fallback.room(task, direction)

    def _nearest(self, task: Task, direction: Direction) -> list[Measured]:
        """Return up to two measurements: of the same family if there are any, else the nearest in size."""
        wanted = self._cost(task, direction)
        known = [
            m
            for m in self._by_op.get(_op(task), ())
            if m.seconds.get(direction, 0.0) > 0 and self._known_cost(m, task, direction) > 0
        ]
        if not known or not wanted:
            return []

        def distance(m: Measured) -> float:
            return abs(math.log(self._known_cost(m, task, direction) / wanted))

        family = family_of(task)
        relatives = sorted((m for m in known if m.family == family), key=distance)
        return relatives[:2] or [min(known, key=distance)]

    def _cost(self, task: Task, direction: Direction) -> float:
        """Return what the time of an operator grows with: operations if it has weights, else bytes.

        One that does little with many weights waits for the memory; its bytes count as the operations
        that the device could do meanwhile.
        """
        nbytes = float(task.nbytes(direction))
        if task.layer.kind not in WEIGHTED:
            return nbytes
        return max(task.flops(direction), self._balance(task) * nbytes)

    def _balance(self, task: Task) -> float:
        return self.fallback.balance(task) if isinstance(self.fallback, Roofline) else 0.0

    def _known_cost(self, entry: Measured, task: Task, direction: Direction) -> float:
        """Return the same of a measurement of such an operator."""
        nbytes = entry.nbytes.get(direction, 0.0)
        if task.layer.kind not in WEIGHTED:
            return nbytes
        return max(entry.flops.get(direction, 0.0), self._balance(task) * nbytes)

    def fields(self) -> tuple[str, ...]:
        """Return the machine's fields that answers of the fallback came from."""
        return tuple(self.fallback.fields())

    def save(self, path: Path) -> None:
        """Write all measurements, in one move so that no reader sees half a file."""
        entries = {
            key: [
                *(m.op, dict(m.seconds), dict(m.spread), dict(m.flops), dict(m.nbytes), dict(m.room)),
                *(m.family, dict(m.alone), dict(m.crowded)),
            ]
            for key, m in self.entries.items()
        }
        content = {
            "version": _VERSION,
            "device": self.device,
            "threads": self.threads,
            "meetings": {str(length): list(met) for length, met in self.meetings.items()},
            "entries": entries,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(content))
        scratch.replace(path)

    @staticmethod
    def load(path: Path, device: str, threads: int, fallback: KernelTimes) -> Profile:
        """Read the measurements of a device; an empty profile if there are none."""
        profile = Profile(device, threads, fallback)
        if not path.is_file():
            return profile
        content = json.loads(path.read_text())
        same = (content.get("version"), content.get("device"), content.get("threads"))
        if same == (_VERSION, device, threads):
            profile.meetings = {int(length): Met(*met) for length, met in content["meetings"].items()}
            for key, values in content["entries"].items():
                profile.add(key, Measured(*values))
        return profile


def measured(
    task: Task,
    seconds: Mapping[str, float],
    spread: Mapping[str, float],
    room: Mapping[str, float] | None = None,
    alone: Mapping[str, float] | None = None,
    crowded: Mapping[str, float] | None = None,
) -> Measured:
    """Put the times of a task together with its sizes, for later scaling."""
    flops = {d.value: task.flops(d) for d in Direction}
    nbytes = {d.value: float(task.nbytes(d)) for d in Direction}
    family, others = family_of(task), (alone or {}, crowded or {})
    return Measured(_op(task), seconds, spread, flops, nbytes, room or {}, family, *others)


def moved(
    move: Move,
    seconds: Mapping[str, float],
    spread: Mapping[str, float],
    alone: Mapping[str, float] | None = None,
    crowded: Mapping[str, float] | None = None,
) -> Measured:
    """Put the time of copies together with their bytes, for later scaling."""
    sizes = ({_ONCE: 0.0}, {_ONCE: move.nbytes})
    among = " ".join(map(str, move.touches[:2])) if move.kind == REDUCE else ""
    return Measured(
        move.kind, seconds, spread, *sizes, family=among, alone=alone or {}, crowded=crowded or {}
    )


def renewed(before: Profile, after: Profile) -> Profile:
    """Return a profile with the times of a later one, and all else that is known from an earlier one."""
    result = Profile(before.device, before.threads, before.fallback, refused=dict(before.refused))
    result.meetings = dict(after.meetings)
    for key, first in before.entries.items():
        second = after.entries.get(key, first)
        seconds, alone = {**first.seconds, **second.seconds}, {**first.alone, **second.alone}
        result.add(key, replace(first, seconds=seconds, spread=second.spread, alone=alone))
    return result


def level(profile: Profile, after: Profile) -> None:
    """Put later times into a profile, at the speed that the machine had when the others were taken."""
    faster = 1.0 / (1.0 + drift(profile, after))
    for key, entry in after.entries.items():
        seconds = {d: faster * value for d, value in entry.seconds.items()}
        profile.add(key, replace(profile.entries.get(key, entry), seconds=seconds, alone=entry.alone))


def drift(before: Profile, after: Profile) -> float:
    """Return how much slower computations were at a later time, all those of both taken together."""
    pairs = [
        (seconds, after.entries[key].seconds[d])
        for key, entry in before.entries.items()
        if key in after.entries
        for d, seconds in entry.seconds.items()
        if d in after.entries[key].seconds
    ]
    first, second = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (1.0, 1.0)
    return second / first - 1


def cache_folder() -> Path:
    """Return where measurements are kept: `SHARDWISE_CACHE`, else the user's cache folder."""
    folder = os.environ.get("SHARDWISE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardwise"
    return Path(folder) if folder else base


def cache_path(device: str, threads: int) -> Path:
    """Return the file of a device's profile."""
    digest = hashlib.sha256(f"{device}/{threads}".encode()).hexdigest()[:12]
    return cache_folder() / f"kernels-{digest}.json"


def _op(task: Task) -> str:
    words = "rectifying shared " if task.rectifies else "shared " if task.shared else ""
    return f"{words}{task.layer.op}"


def _between(points: list[tuple[float, float]], cost: float) -> float:
    """Return the time at a cost: on the line through two measurements, which has a part that never shrinks.

    One measurement, or two that contradict each other, are scaled.
    """
    (near, seconds), (far, others) = points[0], points[-1]
    if far != near:
        slope = (others - seconds) / (far - near)
        fixed = seconds - slope * near
        if slope > 0 and fixed >= 0:
            return fixed + slope * cost
    return seconds * cost / near
