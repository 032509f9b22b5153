"""Models whose code works on torch tensors only: traced with `torch.export`."""

from __future__ import annotations

from typing import Any

import torch
from keras.src.backend.common.stateless_scope import StatelessScope
from torch import Tensor, nn

from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example
from shardwise.graph.keras.module import KerasModule
from shardwise.graph.trace import Trace
from shardwise.graph.trace_export import trace_export


class _Stateless(nn.Module):
    """Call a Keras model with tensors of its module in the places of its variables."""

    of: KerasModule

    def __init__(self, module: KerasModule) -> None:
        super().__init__()
        object.__setattr__(self, "of", module)
        self._parameters = module._parameters
        self._buffers = module._buffers
        self.training = module.training

    def forward(self, *inputs: Tensor) -> Any:
        """Return the outputs; refuse to where variables would change."""
        module = self.of
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        given = {
            entry.name: entry.view.invert(held[entry.name], tuple(entry.variable.shape))
            for entry in module.variables
        }
        with StatelessScope([(entry.variable, given[entry.name]) for entry in module.variables]) as scope:
            result = module.model(module.pack(inputs), training=module.training)
        for entry in module.variables:
            if scope.get_current_value(entry.variable) is not given[entry.name]:
                raise CaptureError(f"it changes its variable {entry.name!r} when it is called")
        return result


def trace_exported(module: KerasModule, example: Example) -> Trace:
    """Return the trace of a model that a symbolic call does not enter."""
    # Keras takes its seeds, which are variables too, from the scope; none of them is drawn here.
    with torch.no_grad():
        return trace_export(_Stateless(module), example)
