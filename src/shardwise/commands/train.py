"""`shardwise train`: train a model from the command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor, nn


def command(
    model: Annotated[str, typer.Argument(help="A zoo model, file.py:function or module:function.")],
    data: Annotated[str, typer.Option(help="digits, or synthetic:3x512x512.")] = "digits",
    plan: Annotated[str, typer.Option(help="How to split training, in one line; auto chooses.")] = "auto",
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Local ranks to start.")] = 1,
    epochs: Annotated[int, typer.Option(help="How often to go through the data.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Samples of a global mini-batch.")] = 32,
    rate: Annotated[float, typer.Option("--lr", help="Learning rate of SGD with momentum.")] = 0.05,
    samples: Annotated[int, typer.Option(help="How many synthetic samples to make.")] = 128,
    seed: Annotated[int, typer.Option(help="What random numbers start from.")] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the results.")] = Path("run"),
    backend: Annotated[str | None, typer.Option(help="nccl, gloo or mpi4py; default: the best one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")] = False,
) -> None:
    """Train MODEL under a plan, show progress, and write plan, history and weights into a folder."""
    import torch

    from shardwise.fit import fit
    from shardwise.graph import capture
    from shardwise.plan import Plan
    from shardwise.runtime.environment import detect
    from shardwise.training.job import is_alone
    from shardwise.training.named_data import input_shape, named_data

    torch.manual_seed(seed)
    classes = 10 if data == "digits" else None
    net = build(model, classes)
    graph = capture(net, torch.zeros((2, *input_shape(data))), training=True, check=False)
    spec = graph[graph.output_names[0]].spec
    train, test = named_data(data, spec, samples)

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=rate, momentum=0.9)

    start = time.perf_counter()
    history = fit(
        net,
        train,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=sgd,
        batch_size=batch_size,
        epochs=epochs,
        plan=plan,
        validation=test,
        metrics={"accuracy": accuracy},
        seed=seed,
        ranks=ranks if is_alone() else None,
        backend=backend,
    )
    seconds = time.perf_counter() - start
    if detect().rank:
        return
    output.mkdir(parents=True, exist_ok=True)
    Plan.parse(history.plan).save(output / "plan.toml")
    history.save(output / "history.json")
    torch.save(net.state_dict(), output / "weights.pt")
    if as_json:
        last = history.epochs[-1] if history.epochs else {}
        result = {"plan": history.plan, "ranks": history.ranks, "output": str(output), "seconds": seconds}
        print(json.dumps(result | {"epochs": len(history), "last": last}))
    else:
        print(history)
        print(f"plan, history and weights are in {output}")


def build(name: str, classes: int | None) -> nn.Module:
    """Return the model that a word on the command line stands for."""
    place, colon, function = name.rpartition(":")
    if not colon:
        from shardwise import zoo

        return zoo.build(name, **({} if classes is None else {"num_classes": classes}))
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise FileNotFoundError(f"model: {place!r} is not a file; expected file.py:function")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise ValueError(f"model: {place!r} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        module = importlib.import_module(place)
    if function not in vars(module):
        raise ValueError(f"model: {place} has no {function!r}; it has {', '.join(sorted(vars(module)))}")
    made: nn.Module = vars(module)[function]()
    return made


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of right answers."""
    return (output.argmax(1) == target).double().mean()
