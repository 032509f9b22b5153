"""Capture a loss like a model, so that its reductions are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.graph.capture import capture
from shardwise.graph.graph import Graph


class LossFunction(nn.Module):
    """Hold a plain function of output and target as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        """Compute the loss."""
        return self.function(output, target)


def capture_loss(loss: Callable[..., Any], output: Any, target: Any, *, check: bool = True) -> Graph:
    """Capture `loss(output, target)` as a graph.

    Args:
        loss: a loss module or any function of output and target.
        output: tensors or specs in the structure that the model returns.
        target: tensors or specs in the structure of the targets.
        check: compare the graph's value with the loss's own.
    """
    module = loss if isinstance(loss, nn.Module) else LossFunction(loss)
    return capture(module, (output, target), check=check)
