"""Run real training steps of many plans in turn on local ranks: how long they take, what memory they need."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.commands.subject import build_model

# The first steps bind and allocate, and find the memory that earlier ones gave back.
_UNTIMED = 3
# The parts of the memory that the trials of all ranks may fill together, and the computations that are timed
# in turn with their steps; the rest is for what processes need themselves.
TRIED, REPLAYED = 0.45, 0.2


@dataclass(frozen=True)
class Subject:
    """A network to validate on: its name, the shape of a sample, and the mini-batch."""

    name: str
    shape: tuple[int, ...]
    batch: int


@dataclass(frozen=True)
class Trial:
    """One network under one plan."""

    subject: Subject
    plan: str


@dataclass(frozen=True)
class Measurement:
    """What the ranks measured: the median step, half its interquartile range, bytes of the fullest rank."""

    seconds: float
    spread: float
    peak_bytes: int
    high_water_bytes: int


def measure_trials(
    trials: Sequence[Trial],
    ranks: int,
    transport: str,
    repeats: int,
    sizes: Sequence[int],
    limit_bytes: float,
    memory: bool = True,
    chains: Callable[[Sequence[Trial]], list[Any]] | None = None,
    deadline: float = 600.0,
) -> tuple[list[Measurement | str], list[tuple[list[Any], list[Any]]]]:
    """Run trials of one number of ranks in turn, so that a slow moment of the machine hits all alike.

    Args:
        trials: what to run.
        ranks: how many processes.
        transport: backend that joins them.
        repeats: timed steps of every trial.
        sizes: bytes that each trial is expected to need on its fullest rank, to know how many can be
            alive at once.
        limit_bytes: what one rank may use.
        memory: whether to measure memory too, which takes processes of its own for every trial.
        chains: return the computations to time in turn with the steps of some trials.
        deadline: seconds after which ranks count as hanging.

    Returns:
        One measurement per trial, or the words of the error that refused it; and chains of computations with
        what each rank that has a core found about them.
    """
    from shardwise.runtime.calibrate.chains import sharing
    from shardwise.runtime.doctor import memory_bytes

    sizes_found = measure_memory(trials, ranks, transport, deadline) if memory else [(0, 0)] * len(trials)
    good = [i for i, found in enumerate(sizes_found) if not isinstance(found, str)]
    results: list[Any] = list(sizes_found)
    timed: list[tuple[list[Any], list[Any]]] = []
    for group in groups_of([sizes[i] for i in good], limit_bytes):
        chosen = [good[i] for i in group]
        mine = [trials[i] for i in chosen]
        replayed = chains(mine) if chains is not None else []
        # Their weights lie in memory beside those of the trials.
        together = sharing(replayed, REPLAYED * memory_bytes() / ranks)
        replayed = [replayed[i] for i in together[0]] if together else []
        found = _job("run_times", (mine, repeats, replayed), ranks, transport, deadline)
        if isinstance(found, str):
            rows: list[Any] = [found] * len(chosen)
        else:
            rows = [*zip(*(steps for steps, _ in found), strict=True)]
            timed.append((replayed, [results for _, results in found if results is not None]))
        for i, row in zip(chosen, rows, strict=True):
            results[i] = row if isinstance(row, str) else _together(row, results[i])
    return results, timed


def groups_of(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Put what has these sizes into groups, in order, each of which fits into memory at once."""
    groups: list[list[int]] = []
    used = 0.0
    for i, size in enumerate(sizes):
        if not groups or used + size > limit:
            groups.append([])
            used = 0.0
        groups[-1].append(i)
        used += size
    return groups


def measure_memory(
    trials: Sequence[Trial], ranks: int, transport: str, deadline: float = 600.0
) -> list[tuple[int, int] | str]:
    """Return the peak of a step's tensors and of the process for every trial, or why it was refused.

    Each has processes of its own: memory that earlier trials gave back would count as used.
    """
    result: list[tuple[int, int] | str] = []
    for trial in trials:
        parts = _job("run_memory", trial, ranks, transport, deadline)
        bad = [parts] if isinstance(parts, str) else [part for part in parts if isinstance(part, str)]
        if bad:
            result.append(bad[0])
        else:
            peaks, high = zip(*parts, strict=True)
            result.append((max(peaks), max(high)))
    return result


def _job(function: str, arguments: Any, ranks: int, transport: str, deadline: float) -> list[Any] | str:
    """Run a function on ranks of its own; one plan that fails must not take the others' results with it."""
    from shardwise.runtime.calibrate.job import measure
    from shardwise.runtime.errors import TransportError

    try:
        return measure(f"{__name__}:{function}", arguments, size=ranks, transport=transport, seconds=deadline)
    except TransportError as error:
        return str(error)


def _together(steps: Sequence[Sequence[float]], memory: tuple[int, int]) -> Measurement:
    """Take the slowest rank of every repeat."""
    slowest = [max(times) for times in zip(*steps, strict=True)]
    quarters = statistics.quantiles(slowest, n=4) if len(slowest) > 1 else [slowest[0]] * 3
    return Measurement(statistics.median(slowest), (quarters[2] - quarters[0]) / 2, *memory)


def run_memory(trial: Any) -> tuple[int, int] | str:
    """Be one rank: return the peak of a step's tensors and buffers, and the process's own peak meanwhile."""
    from shardwise.plan import PlanError
    from shardwise.runtime.heap import give_back
    from shardwise.runtime.memory import measure_high_water, measure_peak

    try:
        buffers, step = _prepare(trial)
    except (PlanError, ValueError) as error:
        # All ranks are refused alike: the plan is checked before anything is sent.
        return str(error)
    step()
    give_back()
    high = measure_high_water(step)
    return measure_peak(step).bytes + buffers(), high


def run_times(arguments: Any) -> tuple[list[list[float]], Any]:
    """Be one rank: return the seconds of every step of some trials, taken in turn, and of some chains.

    Every timed step follows one of the same trial.
    """
    import torch.distributed as dist

    from shardwise.runtime.calibrate.turns import Turns

    trials, repeats, chains = arguments
    steps = [_prepare(trial)[1] for trial in trials]
    turns = Turns(chains)
    found: list[list[float]] = [[] for _ in trials]
    for turn in range(_UNTIMED + repeats):
        for step, seconds in zip(steps, found, strict=True):
            # Training goes on and on: a step finds caches and memory as one like it left them.
            step()
            if turn < _UNTIMED:
                continue
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        if turn >= _UNTIMED:
            turns.turn()
    return found, turns.results()


def _prepare(trial: Trial) -> tuple[Any, Any]:
    """Return what counts communication buffers, and a step; every rank makes only the weights it holds."""
    import torch

    from shardwise.training.trainer import Trainer

    subject = trial.subject
    torch.manual_seed(0)
    model = build_model(subject.name).train()
    x = torch.randn(subject.batch, *subject.shape)
    with torch.no_grad():
        out = model(x.to("meta"))
    loss, target = loss_for(out.shape)
    y = target()
    trainer = Trainer(model, (x, y), trial.plan, loss=loss, optimizer=sgd)
    shapes = (tuple(x.shape), tuple(y.shape))

    def buffers() -> int:
        engine = trainer.engine(shapes)
        sums = engine.reducer.buffer_bytes if engine.reducer is not None else 0
        return engine.buffer_bytes + sums

    return buffers, lambda: trainer.step(x, y)


def loss_for(shape: Sequence[int]) -> tuple[Any, Any]:
    """Return a loss that suits an output of this shape, and a callable that makes a target for it."""
    import torch

    if len(shape) >= 2 and shape[1] > 1:
        size = (shape[0], *shape[2:])
        return torch.nn.CrossEntropyLoss(), lambda: torch.randint(shape[1], size)
    return torch.nn.MSELoss(), lambda: torch.randn(*shape)


def sgd(named: Any) -> Any:
    """Make the optimizer of all trials."""
    import torch

    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)
