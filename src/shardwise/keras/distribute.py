"""Distribute a Keras model: its stock `fit` then trains on all ranks together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import torch
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from shardwise.graph import capture
from shardwise.graph.layer import TensorSpec
from shardwise.keras.callbacks import Agree, Refresh, arranged, wishes
from shardwise.keras.refusals import cuts_weights, refusal
from shardwise.keras.state import (
    Versions,
    agree_all,
    agree_number,
    agree_on_changed,
    agree_random,
    slots,
    spread,
    state_tensors,
    versions,
)
from shardwise.keras.steps import Steps, inputs_of
from shardwise.keras.strategy import Strategy, cut_names, plan_of
from shardwise.keras.weightless import (
    agree_on_seeds,
    check_callbacks,
    check_given,
    is_weightless,
    take_given,
    weightless,
)
from shardwise.plan import Plan, mesh_of
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.session import init
from shardwise.training.auto import auto_plan

_OWN = "_shardwise"


class Distribution:
    """What a distributed Keras model knows besides stock Keras: its plan, and the trainer while it lives."""

    def __init__(self, model: Any, plan: Plan | None, seed: int) -> None:
        self.model, self.plan, self.seed = model, plan, seed
        self.session = init()
        self.fabric = Fabric(mesh_of(plan if plan is not None else Plan(data=self.session.size)))
        self.steps: Steps | None = None
        self._known: Versions = {}

    @property
    def _is_cut(self) -> bool:
        """Tell whether weights may be cut over ranks, so that this rank's slices are copies."""
        return self.plan is None or cuts_weights(self.plan)

    @property
    def trainer(self) -> Any:
        """Return the trainer of the last fit, for predictions, events and tests."""
        if self.steps is None:
            raise ValueError("there is no trainer yet: it is made by the first step of fit")
        return self.steps.trainer

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock loop on every rank, with steps that all ranks compute together."""
        model, first = self.model, self.session.rank == 0
        stock = type(model).fit
        bound = inspect.signature(stock).bind(model, *args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        settings.pop("self")
        self._refuse()
        settings["verbose"] = settings["verbose"] if first else 0
        given = settings["callbacks"] or []
        given = given if isinstance(given, (list, tuple, keras.callbacks.CallbackList)) else [given]
        if is_weightless(model):
            check_callbacks(given)
            if not model.optimizer.built:
                with weightless():
                    model.optimizer.build(model.trainable_variables)
        settings["callbacks"] = self._callbacks(given)
        agree_random(self.fabric.world, self.session.rank)
        if self._is_cut and not is_weightless(model):
            self.steps = None  # slices are copies: take them anew from the model
        own = {"train_step": self._train_step, "test_step": self._test_step}
        for name, function in own.items():
            object.__setattr__(model, name, function)
        try:
            history = stock(model, **settings)
        finally:
            for name in own:
                object.__delattr__(model, name)
        if not self._is_cut:
            self._refresh()
            # All ranks have the same now; the next fit need not compare what nobody touches until then.
            self._known = versions(state_tensors(model))
        return history

    def _callbacks(self, given: Sequence[Any]) -> list[Any]:
        """Return this rank's callbacks; what they need is agreed on, since ranks may have different ones."""
        reads, decides, every = wishes(given)
        reads, every = self._together(reads, every)
        often, _ = self._together(decides, 0.0)
        refresh = Refresh(self._refresh, int(every)) if reads or self._is_cut else None
        agreement = Agree(self._begin, self._together, often)
        return arranged(given, self.session.rank == 0, refresh, agreement)

    def _refuse(self) -> None:
        model = self.model
        trainer = keras.src.trainers.trainer.Trainer
        if not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise ValueError(
                f"Keras model {model.name!r} is not compiled: call model.compile(optimizer=..., loss=...)"
            )
        for name in ("train_step", "test_step", "compute_loss"):
            own = getattr(type(model), name, None)
            if own is not getattr(keras.Model, name, None) and own is not getattr(trainer, name, None):
                raise ValueError(
                    f"{type(model).__name__} has a {name} of its own, which shardwise cannot split; "
                    "use data parallelism with keras.distribution, or the stock step"
                )
        noisy = [layer.name for layer in model._flatten_layers() if layer.activity_regularizer is not None]
        if noisy:
            raise ValueError(
                f"layers {noisy} have activity regularizers, which are not supported under a plan"
            )
        adding = [layer.name for layer in model._flatten_layers() if _adds_losses(layer)]
        if adding:
            raise ValueError(
                f"layers {adding} call add_loss, which is not supported under a plan; give the model another "
                "output and a loss for it"
            )
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError("LossScaleOptimizer is not supported under a plan; use its inner optimizer")
        if model.jit_compile:
            model.jit_compile = False  # the step communicates, so it is not compiled as a whole

    def _begin(self) -> None:
        """Let every rank start from the state of rank 0."""
        model, world, rank = self.model, self.fabric.world, self.session.rank
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if is_weightless(model):
            check_given(world, self.session.size, model.variables)
            agree_on_seeds(world, rank, model.variables)
            if self.steps is not None:
                take_given(self.steps.trainer, self.steps.module.variables)
        else:
            agree_on_changed(world, rank, state_tensors(model), self._known)
        model._initial_epoch = int(agree_number(world, rank, float(model._initial_epoch or 0))) or None

    def _together(self, wish: bool, value: float) -> tuple[bool, float]:
        return agree_all(self.fabric.world, self.session.rank, wish, value)

    def _refresh(self) -> None:
        if self.steps is not None and not is_weightless(self.model):
            steps = self.steps
            spread(steps.trainer, self.model, steps.module.variables, steps.optimizer.pieces)

    def _train_step(self, data: Any) -> Any:
        if self.steps is None or not self.steps.fits(data):
            self.steps = self._made(data)
        return self.steps.train_step(data)

    def _made(self, data: Any) -> Steps:
        """Make the trainer for the structure of a mini-batch, choosing a plan first where none was given."""
        if self.plan is None:
            self.plan = self._chosen(data)
        if not is_weightless(self.model) or self.steps is None:
            return Steps(self.model, self.plan, data, self.seed)
        # The values are where the last cuts put them.
        trainer = self.steps.trainer
        names = tuple(trainer.graph.layers[cut].name for cut in trainer.cuts or ())
        return Steps(self.model, replace(self.plan, cuts=names), data, self.seed, self.steps)

    def _chosen(self, data: Any) -> Plan:
        """Choose a plan of those under which the model trains as Keras trains it."""
        model, (_, _, weight) = self.model, unpack_x_y_sample_weight(data)
        x = tuple(inputs_of(model, data))
        graph = capture(model, x, training=True, check=False)
        kept = len(list(slots(model.optimizer))) / max(1, len(model.optimizer._trainable_variables))
        refuse = partial(refusal, model, graph, weight is not None)
        batch = int(x[0].shape[0])
        return auto_plan(graph, self.session, batch, optimizer_slots=kept, refuse=refuse).plan

    def _test_step(self, data: Any) -> Any:
        if self.steps is None or not self.steps.is_current():
            self.steps = self._made(data)
        with torch.no_grad():
            return self.steps.test_step(data)


def _adds_losses(layer: Any) -> bool:
    """Tell whether a layer's own code adds to the loss."""
    code = getattr(inspect.unwrap(type(layer).call), "__code__", None)
    return code is not None and "add_loss" in code.co_names


def distribute(
    model: Any,
    plan: Plan | str = "auto",
    *,
    strategy: Strategy | None = None,
    num_partitions: int = 1,
    num_replicas: int = 1,
    layers_per_partition: Sequence[int] | None = None,
    micro_batches: int = 1,
    seed: int = 0,
) -> Any:
    """Let the stock `fit` of a Keras model train on all ranks of the job; return the model.

    Every rank calls `fit` with the same data. Afterwards the model is stock Keras on every rank: `save`,
    `predict` and `evaluate` work as ever, with the trained weights.

    Args:
        model: a built Keras model on the torch backend.
        plan: how to split it, as a `Plan` or its one line; `auto` chooses one at the first mini-batch.
        strategy: HyPar-Flow's `data`, `model` or `hybrid`, instead of a plan.
        num_partitions, num_replicas, micro_batches: see `plan_of`.
        layers_per_partition: how many Keras layers each partition has; default: balanced by cost.
        seed: what dropout masks start from; they do not depend on the plan.
    """
    if plan != "auto" and strategy is not None:
        raise ValueError("give either a plan or a strategy, not both")
    if strategy is None and (num_partitions, num_replicas, micro_batches) != (1, 1, 1):
        raise ValueError(
            f"num_partitions={num_partitions}, num_replicas={num_replicas}, micro_batches={micro_batches}: "
            'say which strategy they are for, "data", "model" or "hybrid", or write them into a plan'
        )
    chosen = None if plan == "auto" else Plan.parse(plan)
    if strategy is not None:
        parts = {"num_partitions": num_partitions, "num_replicas": num_replicas}
        chosen = plan_of(strategy, **parts, micro_batches=micro_batches)
    if layers_per_partition is not None:
        if chosen is None:
            raise ValueError("layers_per_partition needs a strategy, or a plan with stages")
        if len(layers_per_partition) != len(chosen.stages):
            raise ValueError(
                f"layers_per_partition: {len(layers_per_partition)} numbers, {len(chosen.stages)} partitions"
            )
        chosen = replace(chosen, cuts=_cuts(model, layers_per_partition))
    before = vars(model).get(_OWN)
    if before is not None and before.steps is not None and is_weightless(model):
        if chosen not in (None, before.plan):
            raise ValueError(
                f"the ranks have the weights of {model.name!r} as {str(before.plan)!r} left them; call "
                f"sw.keras.gather(model) before {str(chosen)!r}"
            )
        return model
    undistribute(model)
    distribution = Distribution(model, chosen, seed)
    object.__setattr__(model, _OWN, distribution)

    @functools.wraps(type(model).fit)
    def fit(*args: Any, **kwargs: Any) -> Any:
        return distribution.fit(*args, **kwargs)

    object.__setattr__(model, "fit", fit)
    return model


def _cuts(model: Any, counts: Sequence[int]) -> tuple[str, ...]:
    specs = [
        TensorSpec(
            tuple(2 if d is None and i == 0 else 64 if d is None else d for i, d in enumerate(t.shape)),
            t.dtype,
        )
        for t in model.inputs
    ]
    return cut_names(model, capture(model, tuple(specs), training=True, check=False), counts)


def undistribute(model: Any) -> Any:
    """Give a model its stock `fit` back; return the model."""
    for name in (_OWN, "fit"):
        if name in vars(model):
            object.__delattr__(model, name)
    return model


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    plan: Plan | str = "auto",
    strategy: Strategy | None = None,
    num_partitions: int = 1,
    num_replicas: int = 1,
    layers_per_partition: Sequence[int] | None = None,
    micro_batches: int = 1,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Train a compiled Keras model under a plan, or a strategy of HyPar-Flow; see `distribute`.

    All other arguments are those of `model.fit`. Afterwards the model is stock again, unless it was built
    weightless: then `sw.keras.gather(model)` makes it so.
    """
    distribute(
        model,
        plan,
        strategy=strategy,
        num_partitions=num_partitions,
        num_replicas=num_replicas,
        layers_per_partition=layers_per_partition,
        micro_batches=micro_batches,
        seed=seed,
    )
    try:
        return model.fit(x, y, **settings)
    finally:
        if not is_weightless(model):
            undistribute(model)
