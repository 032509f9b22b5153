"""Where the time of a tiled step goes, beside that of independent halves: `parts.py [case [kinds]]`.

Also shows what it is worth that tiles are made inside the tensors that their halos complete (`copied` is the
same step with each tile copied there), that autograd lets go of gradients once they were read (`held`), and
that gradients are summed in shared memory (`messages`: by MPI).
Kinds of steps that take turns in one process find memory cut up by the others: `halves,tiles,held` has fewer.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import launch  # noqa: E402  (found beside this folder)

REPEATS = 7


def main() -> None:
    """Start the ranks and print their times."""
    case, kinds = [*sys.argv[1:3], *("unet-nobn:512:1", "halves,tiles,copied,held")[len(sys.argv) - 1 :]]
    rows = launch(HERE / "parts.py", 2, "mpi4py", "rank", case, kinds)["rows"]
    text = [
        f"# {case}: milliseconds in parts of a step, medians of {REPEATS} in turns, mean of both ranks",
        "",
        "| step | part | ms |",
        "|---|---|---:|",
        *(f"| {step} | {part} | {1e3 * seconds:.1f} |" for step, part, seconds in rows),
    ]
    print("\n".join(text))


def rank(case: str, kinds: str, target: str) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from measure import make, sgd
    from turns import write

    import shardwise as sw
    from shardwise.program import Regrid
    from shardwise.runtime import segment
    from shardwise.runtime.communications import Exchanged, Normalised
    from shardwise.runtime.mpi import line
    from shardwise.runtime.reducer import Reducer
    from shardwise.runtime.segment import Segment

    sw.init()
    torch.set_num_threads(1)
    _, x, y = make(case)
    half = x.shape[2] // 2
    top, part = x[:, :, :half].contiguous(), y if y.ndim == 1 else y[:, :half].contiguous()
    model = make(case)[0]
    optimizer = sgd(model.named_parameters())
    spent: Counter[str] = Counter()

    def halves() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _timed(spent, "computations, forwards"):
            loss = F.cross_entropy(model(top), part)
        with _timed(spent, "computations, backwards"):
            loss.backward()
        optimizer.step()

    def tiles() -> Callable[[], object]:
        trainer = sw.Trainer(make(case)[0], (x, y), "spatial=2x1", loss=F.cross_entropy, optimizer=sgd)
        trainer.step(x, y)
        return lambda: trainer.step(x, y)

    for kind, method, name in (
        (Segment, "forward", "computations, forwards"),
        (Segment, "begin", "computations, backwards"),
        (Exchanged, "forward", "exchanges, forwards"),
        (Exchanged, "begin", "exchanges, backwards"),
        (Exchanged, "end", "exchanges, backwards"),
        (Normalised, "forward", "norms, forwards"),
        (Normalised, "begin", "norms, backwards"),
        (Normalised, "end", "norms, backwards"),
        (Reducer, "ready", "sums of gradients (most of it in the computations)"),
        (Reducer, "finish", "sums of gradients (most of it in the computations)"),
    ):
        _watch(kind, method, spent, name)

    def copied() -> Callable[[], object]:
        with mock.patch.object(Regrid, "lands", return_value=False):
            return tiles()

    def held() -> Callable[[], object]:
        run = tiles()

        def step() -> None:
            with mock.patch.object(segment, "stand_in", lambda _edge, holder, _own: holder.pop()):
                run()

        return step

    def messages() -> Callable[[], object]:
        run = tiles()

        def step() -> None:
            with mock.patch.object(line, "fits_shelf", return_value=False):
                run()

        return step

    makers = {
        "halves": ("independent halves", lambda: halves),
        "tiles": ("tiles", tiles),
        "copied": ("tiles, copied", copied),
        "held": ("tiles, gradients held", held),
        "messages": ("tiles, gradients summed by messages", messages),
    }
    steps = {name: make_step() for name, make_step in (makers[kind] for kind in kinds.split(","))}
    found: dict[tuple[str, str], list[float]] = {}
    for repeat in range(2 + REPEATS):
        for step, run in steps.items():
            # Every timed step follows one of its kind.
            run()
            dist.barrier()
            spent.clear()
            with _timed(spent, "whole step"):
                run()
            for name, seconds in spent.items() if repeat >= 2 else ():
                found.setdefault((step, name), []).append(seconds)
    medians = [(step, name, sorted(times)[len(times) // 2]) for (step, name), times in found.items()]
    both: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(both, medians)
    rows = [
        (step, name, sum(times[i][2] for times in both) / len(both))
        for i, (step, name, _) in enumerate(medians)
    ]
    write(target, {"rows": rows})
    sw.finalize()


class _timed:
    """Add the time inside to a name."""

    def __init__(self, spent: Counter[str], name: str) -> None:
        self.spent, self.name = spent, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent[self.name] += time.perf_counter() - self.start  # type: ignore[assignment]


def _watch(kind: type, method: str, spent: Counter[str], name: str) -> None:
    original = getattr(kind, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with _timed(spent, name):
            return original(*args, **kwargs)

    setattr(kind, method, timed)


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
