"""Models of other frameworks: seen as modules that know how to capture themselves."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from shardwise.graph.graph import Graph


class Foreign(nn.Module):
    """A model of another framework, with its weights as parameters and buffers by name.

    They share memory with the framework's own, so that training shows there.
    """

    @abstractmethod
    def flatten(self, inputs: Any) -> list[Any]:
        """Return the model's inputs in order, whatever structure they are given in."""

    @abstractmethod
    def capture(self, example: Any, *, training: bool, check: bool) -> Graph:
        """Return the graph of the model."""


def is_keras(model: object) -> bool:
    """Tell whether a model is Keras's, without ever importing Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)


def adapt(model: Any) -> nn.Module:
    """Return a module that can be captured: a Keras model in its wrapping, a module as it is."""
    if not is_keras(model):
        module: nn.Module = model
        return module
    from shardwise.graph.keras import wrap

    return wrap(model)
