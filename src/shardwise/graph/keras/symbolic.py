"""Call a layer on Keras's symbols, to see which operations are inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import set_keras_mask
from keras.src.layers.layer import CallContext
from keras.src.ops.function import Function

from shardwise.graph.keras.flow import Flow
from shardwise.graph.lines import first_line


@dataclass(frozen=True, eq=False, slots=True)
class Inside:
    """A graph of Keras operations, and the flows that enter it."""

    function: Any
    flows: Sequence[Flow]


class Symbols:
    """Stand-ins for flows; a mask gets one of its own, which its tensor carries."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.flows: list[Flow] = []

    def of(self, tree: Any) -> Any:
        """Return a tree with symbols in the places of flows."""
        return keras.tree.map_structure(self._leaf, tree)

    def _leaf(self, item: Any) -> Any:
        if not isinstance(item, Flow):
            return item
        symbol = keras.Input(batch_shape=(None, *item.shape[1:]), dtype=item.dtype)
        self.made.append(symbol)
        self.flows.append(item)
        if item.mask is not None:
            set_keras_mask(symbol, self._leaf(item.mask))
        return symbol


def called_on_symbols(layer: Any, args: Any, kwargs: Mapping[str, Any], training: bool) -> Inside | str:
    """Call a layer on symbols; return the graph that comes out, or why there is none."""
    symbols = Symbols()
    positional = symbols.of(args if isinstance(args, tuple) else (args,))
    named = symbols.of(dict(kwargs))
    if "training" not in named and getattr(layer, "_call_has_training_arg", False):
        named["training"] = training
    try:
        with _called(layer, named.get("training", training)):
            outputs = layer.call(*positional, **named)
        function = Function(symbols.made, outputs)
    except Exception as error:  # whatever the user's code does with symbols, the layer then runs whole
        return first_line(error)
    hidden = _hidden_variables(layer, function)
    if hidden:
        # What the layer computed from them is a constant in this graph, and would not be trained.
        return f"its variables {hidden} are used outside of Keras's graph"
    return Inside(function, symbols.flows)


@contextlib.contextmanager
def _called(layer: Any, training: bool) -> Iterator[None]:
    """Let layers inside see what a call of this one tells them: whether it is trained.

    What is said to one of them holds for those that are called after it, which is Keras's own rule.
    """
    name = "current_call_ctx"
    before = global_state.get_global_attribute(name)
    context = CallContext(entry_layer=layer)
    context.set_value("training", training)
    global_state.set_global_attribute(name, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


def _hidden_variables(layer: Any, function: Any) -> list[str]:
    """Return the variables of a layer that its graph neither shows nor leaves to a layer inside."""
    shown: set[int] = set()
    for node in (node for nodes in function._nodes_by_depth.values() for node in nodes):
        if node.is_input:
            continue
        if isinstance(node.operation, keras.layers.Layer):
            shown.update(id(v) for v in node.operation.variables)
        arguments = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
        shown.update(id(a) for a in arguments if isinstance(a, keras.Variable))
    return [v.path for v in layer.variables if id(v) not in shown]


def is_stateful(layer: Any) -> bool:
    """Tell whether a layer may change variables of its own when it is called: averages, seeds.

    Those of layers inside do not count: each of them is asked in its turn.
    """
    return bool(layer._non_trainable_variables or layer._seed_generators)
