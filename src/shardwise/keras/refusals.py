"""Why a plan does not suit a Keras model: told before training, and known to whoever chooses one."""

from __future__ import annotations

from typing import Any

from shardwise.graph import Graph, Kind
from shardwise.keras.loss import check_losses
from shardwise.keras.optimizer import check_elementwise
from shardwise.keras.penalties import reads_whole
from shardwise.keras.state import is_same
from shardwise.plan import Plan, micro_batches_of
from shardwise.training.auto import changes_numbers
from shardwise.training.trainer import Trainer


def cuts_weights(plan: Plan) -> bool:
    """Tell whether a plan may cut weights over ranks."""
    return plan.tail == "filter" or any(split.way.value in ("filter", "channel") for split in plan.stages)


def check_statistics(graph: Graph, plan: Plan) -> None:
    """Refuse replicas where a layer that runs whole keeps averages: each would see its own share only."""
    if plan.data == 1 or plan.batch_norm == "local":
        return
    for layer in graph:
        averages = [name for name in layer.buffers if graph.buffers[name].is_float]
        if layer.kind is Kind.OTHER and averages:
            raise ValueError(
                f"layer {layer.name!r} runs whole ({layer.reason}) and updates {averages}: {plan.data} "
                "replicas would each use the statistics of their own samples; accept that with "
                "batch_norm=local, or use stages"
            )


def check_names(graph: Graph, trainer: Trainer) -> None:
    """Refuse ranks that call their dropouts differently, since masks are drawn by name; collective."""
    names = [layer.name for layer in graph if layer.kind is Kind.DROPOUT]
    if not is_same(trainer.fabric.world, trainer.fabric.rank, names):
        raise ValueError(
            f"the dropout layers, here {names}, have other names on other ranks, and would draw other masks: "
            "give them names, or call keras.utils.clear_session() on every rank before the model is made"
        )


def refusal(model: Any, graph: Graph, weighted: bool, plan: Plan) -> str:
    """Say why a plan must not be chosen for a model, or nothing.

    A user may name a plan that cuts weights where, as it turns out, none that matters is cut; a choice is
    on the safe side.
    """
    said = changes_numbers(graph, plan)
    if said:
        return said
    try:
        check_losses(model, plan.data * micro_batches_of(plan), weighted)
        check_statistics(graph, plan)
        if cuts_weights(plan):
            check_elementwise(model.optimizer)
    except ValueError as error:
        return str(error)
    if model.optimizer.use_ema and (cuts_weights(plan) or len(plan.stages) > 1):
        return "use_ema needs all weights on every rank"
    if cuts_weights(plan):
        whole = [v.path for v in model.trainable_variables if reads_whole(v.regularizer)]
        if whole:
            return f"the regularizers of {whole} read whole weights"
    drawing = [layer.name for layer in graph if layer.kind is Kind.OTHER and _draws(graph, layer)]
    if plan.data > 1 and drawing:
        return f"layers {drawing} run whole and would draw the same random numbers in each replica"
    return ""


def _draws(graph: Graph, layer: Any) -> bool:
    return any(not graph.buffers[name].is_float for name in layer.buffers)
