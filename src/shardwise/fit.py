"""Go: train a model under a plan."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from shardwise.graph.attach import attach
from shardwise.graph.foreign import is_keras
from shardwise.machine import Machine
from shardwise.plan import Plan
from shardwise.runtime.environment import detect
from shardwise.runtime.materialise import Init, on_meta
from shardwise.runtime.session import init as join
from shardwise.training.auto import (
    PROFILE_SECONDS,
    Auto,
    auto_plan,
    changes_numbers,
    is_open,
    settled_plan,
    slots_of,
)
from shardwise.training.callbacks import Callback, EarlyStopping
from shardwise.training.check import CheckReport, check
from shardwise.training.compare import Compare
from shardwise.training.given import Model, made
from shardwise.training.history import History
from shardwise.training.job import is_alone, on_ranks
from shardwise.training.loop import Loop, Scheduler
from shardwise.training.loss_graph import Loss, loss_graph
from shardwise.training.loss_kind import OTHER, loss_kind
from shardwise.training.sources import source_of
from shardwise.training.trainer import Optimizer, Trainer
from shardwise.training.whole_model import is_whole, network_of, whole_plan

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = ["Callback", "CheckReport", "EarlyStopping", "History", "Trainer", "check", "fit"]


def _keras_too(function: Function) -> Function:
    """Hand Keras models over to their own loop, whose arguments are those of `model.fit`."""

    @functools.wraps(function)
    def either(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_keras(model):
            from shardwise.keras import fit as keras_fit

            return keras_fit(model, *args, **kwargs)
        return function(model, *args, **kwargs)

    return cast(Function, either)


@_keras_too
def fit(
    model: Model,
    data: Any,
    *,
    loss: Loss,
    optimizer: Optimizer,
    batch_size: int | None = None,
    epochs: int = 1,
    plan: Plan | str = "auto",
    metrics: Any = None,
    validation: Any = None,
    callbacks: Sequence[Callback] = (),
    scheduler: Scheduler | None = None,
    scheduler_every: str = "epoch",
    shuffle: bool = True,
    drop_last: bool = False,
    workers: int = 0,
    varying_sizes: bool = False,
    clip_norm: float | None = None,
    accumulate: int = 1,
    loss_mean: str = "exact",
    seed: int = 0,
    init: Init | None = None,
    memory_limit: float | None = None,
    ranks: int | None = None,
    backend: str | None = None,
    save: str | Path | None = None,
    progress: bool = True,
    machine: Machine | str | Path | None = None,
    profile_seconds: float = PROFILE_SECONDS,
) -> History:
    """Train a model under a plan, with the numbers of one device; the trained weights are in the model then.

    The same call works alone in a process, on the ranks of a job that a launcher started, and, with
    `ranks`, from a plain script or notebook, where it starts local ranks itself.

    A compiled Keras model is trained as its own `fit` does, `sw.fit(model, x, y, plan=..., ...)`, or with
    HyPar-Flow's words, `sw.fit(model, x, y, strategy="hybrid", num_partitions=2, num_replicas=2, ...)`.

    Args:
        model: any module; or a callable that makes one, or a module on meta, of which each rank then has
            only its own part (see `save`).
        data: a Dataset, a DataLoader, or an iterable of mini-batches `(x, y)` that is the same on every
            rank. Of a Dataset each rank loads only the samples that it needs.
        loss: a callable `(output, target) -> scalar`.
        optimizer: a callable that makes an optimizer from (name, parameter) pairs.
        batch_size: samples of a global mini-batch, whatever the plan is.
        epochs: how often to go through the data.
        plan: how to split training, as a `Plan` or its one line; `auto` asks the oracle for the fastest one
            that fits and changes no number, prints why, and compares after the first epoch.
        metrics: callables `(output, target) -> number`, by name or in a list, measured on `validation`.
        validation: data like `data`, evaluated after every epoch.
        callbacks: see `Callback`; `EarlyStopping` is one.
        scheduler: a callable that makes a learning-rate scheduler from the optimizer.
        scheduler_every: whether it steps every `epoch` or every `step`.
        shuffle: whether each epoch has its own order (a DataLoader has its own opinion).
        drop_last: whether to leave out a last mini-batch that is smaller.
        workers: processes that load samples, on each rank.
        varying_sizes: whether image sizes differ between mini-batches.
        clip_norm, accumulate, loss_mean, seed, init, memory_limit: see `Trainer`.
        ranks: how many local ranks to start; None for the ranks of the job, or one process alone.
        backend: the transport of local ranks.
        save: a folder for weights, optimizer and plan at the end.
        progress: whether rank 0 shows how it goes.
        machine: for `auto`, a `Machine`, a preset's name or a file; default `SHARDWISE_MACHINE`, then
            `here.toml`, then what an earlier job measured, else it is measured now.
        profile_seconds: for `auto`, how long to measure layer shapes that were not seen before.
    """
    settings = {
        name: value for name, value in locals().items() if name not in ("model", "data", "ranks", "backend")
    }
    if ranks is not None and ranks > 1 and is_alone():
        history, state = on_ranks(ranks, _fit_and_state, model, data, settings, backend=backend)
        whole = made(model)
        if state is not None and not on_meta(whole):
            whole.load_state_dict(state)
        return history  # type: ignore[no-any-return]
    size = detect().size
    if ranks is not None and ranks != size:
        raise ValueError(f"ranks: {ranks} asked for, but a launcher started {size}; leave it out")
    return _fit(model, data, **settings)[0]


def _fit_and_state(
    model: Model, data: Any, settings: dict[str, Any]
) -> tuple[History, dict[str, Tensor] | None]:
    """Train on the ranks of a job; rank 0's result goes back to who started them."""
    history, trainer = _fit(model, data, **settings)
    if on_meta(trainer.model) or trainer.fabric.rank:
        return history, None
    return history, {name: tensor.detach().cpu() for name, tensor in trainer.model.state_dict().items()}


def _fit(
    model: Model,
    data: Any,
    *,
    loss: Loss,
    optimizer: Optimizer,
    batch_size: int | None,
    epochs: int,
    plan: Plan | str,
    validation: Any,
    shuffle: bool,
    drop_last: bool,
    workers: int,
    varying_sizes: bool,
    save: str | Path | None,
    seed: int,
    clip_norm: float | None,
    accumulate: int,
    loss_mean: str,
    init: Init | None,
    memory_limit: float | None,
    machine: Machine | str | Path | None,
    profile_seconds: float,
    callbacks: Sequence[Callback],
    progress: bool,
    **looping: Any,
) -> tuple[History, Trainer]:
    loading: dict[str, Any] = {"workers": workers, "varying_sizes": varying_sizes}
    source = source_of(data, batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last, **loading)
    held_out = None if validation is None else source_of(validation, batch_size, what="validation", **loading)
    for given in (source, held_out):
        if given is not None:
            given.check_epochs(epochs)
    example = source.first()
    module = made(model)
    chosen = _resolve(
        plan,
        module,
        example,
        source.batch_size,
        loss=loss,
        optimizer=optimizer,
        loss_mean=loss_mean,
        cut=memory_limit is None,
        machine=machine,
        profile_seconds=profile_seconds,
        show=progress,
    )
    hooks = list(callbacks)
    if chosen.prediction is not None:
        hooks.append(Compare(chosen.prediction, progress))
    trainer = Trainer(
        module,
        example,
        chosen.plan,
        loss=loss,
        optimizer=optimizer,
        seed=seed,
        clip_norm=clip_norm,
        accumulate=accumulate,
        loss_mean=loss_mean,
        init=init,
        memory_limit=memory_limit,
    )
    loop = Loop(trainer, source, held_out, seed=seed, callbacks=hooks, progress=progress, **looping)
    history = loop.run(epochs)
    trainer.write_back()
    if save is not None:
        trainer.save(save)
    return history, trainer


def _resolve(
    plan: Plan | str,
    model: nn.Module,
    example: tuple[Any, Any],
    batch_size: int | None,
    *,
    loss: Loss,
    optimizer: Optimizer,
    loss_mean: str,
    cut: bool,
    **asking: Any,
) -> Auto:
    """Return the plan that is meant: as given, with what it leaves open settled, or chosen for this job.

    Where the machine is known stages are `cut` by price, unless the trainer has to within a limit of memory.
    """
    session = join()
    given = None if plan == "auto" else Plan.parse(plan)
    if given is not None and not is_open(given, cut=cut):
        return Auto(given)
    if session.size == 1:
        return Auto(given or Plan())
    network = network_of(model, example[0], training=True)
    if is_whole(network):
        return Auto(given or whole_plan(model, session.size), reasons=network.notes)
    ending = loss_graph(loss, network.output_specs, example[1])
    # Losses that are means are no reason to refuse anything, and asking for every plan takes time.
    delicate = ending if loss_kind(ending).kind == OTHER else None
    graph = attach(network, ending)
    batch = batch_size or graph.batch
    slots = slots_of(optimizer(list(model.named_parameters())))
    if given is not None:
        return Auto(settled_plan(graph, session, given, batch, asking["machine"], slots))
    return auto_plan(
        graph,
        session,
        batch,
        optimizer_slots=slots,
        refuse=partial(changes_numbers, graph, ending=delicate, loss_mean=loss_mean),
        **asking,
    )


class _Callable(ModuleType):
    """Let `shardwise.fit(...)` work also after an import of this module, which takes the function's name."""

    def __call__(self, *args: Any, **kwargs: Any) -> History:
        """Train; see `fit`."""
        return fit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
