"""A Keras model as a torch module: the same weights, under Keras's paths, in the order torch wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import torch
from keras.src.ops.function import Function
from torch import Tensor, nn

from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example, spec_of
from shardwise.graph.foreign import Foreign
from shardwise.graph.graph import Graph
from shardwise.graph.keras.variables import Named, named_variables
from shardwise.graph.layer import TensorSpec
from shardwise.graph.trace import Result


class KerasModule(Foreign):
    """Hold a Keras model's variables as parameters and buffers that share their memory.

    Args:
        model: a built Keras model, on the torch backend.
    """

    model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        if keras.backend.backend() != "torch":
            raise ValueError(
                f"shardwise needs Keras on the torch backend, this is {keras.backend.backend()!r}: set "
                "KERAS_BACKEND=torch before Keras is imported"
            )
        # Not as a submodule: its parameters would appear twice, once in each order.
        object.__setattr__(self, "model", model)
        # None where nothing is known: one tensor is given as it is, several as a list.
        self.structure = model._inputs_struct if isinstance(model, Function) else []
        self.variables: list[Named] = named_variables(model)
        # Whether outputs carry masks, which a graph has no place for; known once the model is captured.
        self.masked = False
        self.names = {id(entry.variable): entry.name for entry in self.variables}
        for entry in self.variables:
            tensor = entry.view.apply(entry.variable.value.detach())
            if entry.is_weight and tensor.is_floating_point():
                trained = entry.is_trained
                self.register_parameter(entry.name, nn.Parameter(tensor, requires_grad=trained))
            else:
                self.register_buffer(entry.name, tensor)

    def forward(self, *inputs: Tensor) -> Any:
        """Call the Keras model on its inputs, in the order of `model.inputs`."""
        return self.model(self.pack(inputs), training=self.training)

    def pack(self, inputs: Sequence[Any]) -> Any:
        """Return inputs in the structure that the model is called with: one, a list, or a dict."""
        if len(keras.tree.flatten(self.structure)) != len(inputs):
            return inputs[0] if len(inputs) == 1 else list(inputs)
        return keras.tree.pack_sequence_as(self.structure, list(inputs))

    def learn(self, inputs: Any) -> None:
        """Remember the structure of inputs that a model without a graph is called with; a tuple is flat."""
        if input_symbols(self.model) is None and not isinstance(inputs, tuple):
            self.structure = keras.tree.map_structure(lambda _: 0, inputs)

    def flatten(self, inputs: Any) -> list[Any]:
        """Return inputs in the order of `model.inputs`: one tensor, a sequence, or a dict by input name."""
        return flat_inputs(self.model, inputs)

    def read(self, inputs: Any) -> Example:
        """Return an example of the model's arguments."""
        flat = self.flatten(inputs)
        symbols = input_symbols(self.model)
        self.learn(inputs)
        names = tuple(f"input{i}" if symbols is None else symbols[i].name for i in range(len(flat)))
        specs: Sequence[TensorSpec] = [t if isinstance(t, TensorSpec) else spec_of(t) for t in flat]
        for name, spec, wanted in zip(names, specs, symbols or specs, strict=True):
            if spec.dtype != str(wanted.dtype):
                raise CaptureError(f"input {name!r} is {spec.dtype}, the model wants {wanted.dtype}")
        tensors = tuple(None if isinstance(t, TensorSpec) else t for t in flat)
        return Example(tuple(Result(name) for name in names), {}, names, tuple(specs), tensors)

    def capture(self, example: Any, *, training: bool, check: bool) -> Graph:
        """Return the graph of the model, captured from Keras's own graph."""
        from shardwise.graph.keras.capture import capture_keras

        return capture_keras(self, self.read(example), training=training, check=check)


def input_symbols(model: Any) -> list[Any] | None:
    """Return Keras's symbols of a model's inputs in order, or None for a model that has no graph."""
    if isinstance(model, (Function, keras.Sequential)):
        return list(model.inputs)
    return None


def flat_inputs(model: Any, inputs: Any) -> list[Any]:
    """Return inputs in the order of `model.inputs`: one tensor, a sequence, or a dict.

    A dict has the keys of the dict that the model was made with, or the names of its inputs.
    """
    symbols = input_symbols(model)
    if symbols is None:
        return [inputs] if isinstance(inputs, (Tensor, TensorSpec)) else list(keras.tree.flatten(inputs))
    names = [symbol.name for symbol in symbols]
    keys = _input_keys(model)
    if isinstance(inputs, Mapping) and keys and all(key in inputs for key in keys):
        return list(keras.tree.flatten({key: inputs[key] for key in keys}))
    if isinstance(inputs, Mapping):
        missing = [name for name in names if name not in inputs]
        if missing:
            wanted = f", or by the keys {keys}" if keys and keys != names else ""
            raise CaptureError(f"inputs {missing}{wanted} are missing; given are {sorted(inputs)}")
        return [inputs[name] for name in names]
    flat = [inputs] if isinstance(inputs, (Tensor, TensorSpec)) else keras.tree.flatten(inputs)
    if len(flat) != len(names):
        raise CaptureError(f"the model has {len(names)} inputs ({names}), {len(flat)} were given")
    return list(flat)


def _input_keys(model: Any) -> list[str]:
    """Return the keys of the dict of inputs that a model was made with, if it was."""
    function = model._functional if isinstance(model, keras.Sequential) else model
    struct = getattr(function, "_inputs_struct", None)
    return list(struct) if isinstance(struct, Mapping) else []


def wrap(model: Any) -> KerasModule:
    """Return a Keras model as a module; it must have been built."""
    if not model.built:
        raise CaptureError(
            f"Keras model {model.name!r} has no weights yet: call it once, or model.build(...)"
        )
    return KerasModule(model)


@contextlib.contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Let dropout pass everything for a while, since masks are drawn differently here."""
    kinds = (keras.layers.Dropout, keras.layers.SpatialDropout1D, keras.layers.SpatialDropout2D)
    found = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, (*kinds, keras.layers.SpatialDropout3D))
    ]
    rates = [layer.rate for layer in found]
    try:
        for layer in found:
            layer.rate = 0
        yield
    finally:
        for layer, rate in zip(found, rates, strict=True):
            layer.rate = rate


def same_device(model: Any) -> torch.device:
    """Return where a model's variables are."""
    return next((v.value.device for v in model.variables), torch.device("cpu"))
