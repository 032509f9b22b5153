"""Losses are captured like models: kinds, settings and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measuring import assert_same, run
from torch import Tensor, nn

from shardwise.graph import Kind, TensorSpec, capture_loss
from shardwise.graph.loss import LossFunction

PIXELS, CLASSES = TensorSpec((2, 3, 4, 4)), TensorSpec((2, 4, 4), "int64")
LOSSES: dict[str, tuple[Callable[..., Any], TensorSpec, dict[str, Any]]] = {
    "cross_entropy": (
        nn.CrossEntropyLoss(weight=torch.rand(3), ignore_index=2, label_smoothing=0.1),
        CLASSES,
        {"ignore_index": 2, "reduction": "mean", "label_smoothing": 0.1},
    ),
    "nll_loss": (lambda x, y: F.nll_loss(x, y), CLASSES, {"ignore_index": -100, "reduction": "mean"}),
    "mse_loss": (nn.MSELoss(reduction="sum"), PIXELS, {"reduction": "sum"}),
    "l1_loss": (F.l1_loss, PIXELS, {"reduction": "mean"}),
    "smooth_l1_loss": (nn.SmoothL1Loss(beta=0.5), PIXELS, {"reduction": "mean", "beta": 0.5}),
    "huber_loss": (nn.HuberLoss(delta=2.0), PIXELS, {"reduction": "mean", "delta": 2.0}),
    "binary_cross_entropy": (F.binary_cross_entropy, PIXELS, {"reduction": "mean"}),
    "binary_cross_entropy_with_logits": (
        nn.BCEWithLogitsLoss(pos_weight=torch.rand(4)),
        PIXELS,
        {"reduction": "mean"},
    ),
    "kl_div": (nn.KLDivLoss(reduction="batchmean"), PIXELS, {"reduction": "batchmean", "log_target": False}),
}


@pytest.mark.parametrize("op", LOSSES)
def test_known_losses_keep_their_settings(op: str) -> None:
    loss, target, settings = LOSSES[op]
    graph = capture_loss(loss, PIXELS, target)
    layer = graph.layers[-1]
    assert (layer.kind, layer.op) == (Kind.LOSS, op)
    assert layer.attributes == settings
    assert [o.role for o in layer.operands][:2] == ["input", "target"]
    assert graph.outputs == layer.name
    module = loss if isinstance(loss, nn.Module) else LossFunction(loss)
    x = torch.rand(PIXELS.shape)
    y = torch.zeros(target.shape, dtype=torch.int64) if target is CLASSES else torch.rand(target.shape)
    assert_same(run(graph, module, [x, y]), module(x, y))


def dice(output: dict[str, Tensor], target: Tensor) -> Tensor:
    p = torch.sigmoid(output["logits"])
    mask = (target >= 0).float()
    overlap = (p * target * mask).sum(dim=(1, 2, 3))
    total = ((p + target) * mask).sum(dim=(1, 2, 3))
    return 1 - ((2 * overlap + 1) / (total + 1)).mean()


def test_a_written_out_loss_on_a_nested_output_becomes_its_reductions() -> None:
    spec = TensorSpec((2, 1, 4, 4))
    graph = capture_loss(dice, {"logits": spec}, spec)
    assert [layer.op for layer in graph if layer.kind is Kind.REDUCTION] == ["sum", "sum", "mean"]
    assert [layer.name for layer in graph.inputs] == ["output", "target"]
    assert graph["sum"].contracts == (((0, 1),), ((0, 2),), ((0, 3),))
    assert all(layer.kind is not Kind.OTHER for layer in graph)
    bigger = graph.at((5, 1, 6, 6), (5, 1, 6, 6))
    x, y = torch.randn(5, 1, 6, 6), torch.rand(5, 1, 6, 6)
    assert_same(run(bigger, LossFunction(dice), [x, y]), dice({"logits": x}, y))


def test_a_sum_of_losses_is_a_join_of_losses() -> None:
    def both(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * output.square().mean()

    graph = capture_loss(both, TensorSpec((4, 10)), TensorSpec((4,), "int64"))
    assert [layer.op for layer in graph][2:] == ["cross_entropy", "square", "mean", "mul", "add"]
    assert graph.layers[-1].shape == ()
