"""Walk Keras's own graph and write down torch functions: the trace of a Keras model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example, spec_of
from shardwise.graph.keras import layers as rules
from shardwise.graph.keras import masks
from shardwise.graph.keras.flow import Flow, Scribe, flows_in
from shardwise.graph.keras.module import KerasModule
from shardwise.graph.keras.walker import Walker
from shardwise.graph.layer import Source
from shardwise.graph.trace import Held, Result, Step, Trace, Weight, leaves

__all__ = ["rules", "walk"]


def walk(module: KerasModule, example: Example, *, whole: str = "") -> Trace:
    """Return the trace of a Keras model for the behaviour that its module is set to.

    Args:
        module: the model.
        example: its arguments.
        whole: why the model is not entered but is one call, or "" to enter it.
    """
    scribe = Scribe(module)
    model = module.model
    flows = [
        Flow(Result(name), tuple(spec.shape), spec.dtype)
        for name, spec in zip(example.names, example.specs, strict=True)
    ]
    walker = Walker(scribe)
    args = (module.pack(flows),)
    inside = None if whole else walker.inside(model, args, {})
    if inside is not None:
        outputs = walker.run(inside, "")
        symbols = keras.tree.flatten(inside.function._outputs_struct)
        explicit = any(masks.explicit(symbol) is not None for symbol in symbols)
        module.masked = explicit or any(flow.mask is not None for flow in flows_in(outputs))
    elif whole:
        scribe.label = model.name
        outputs = walker.whole(model, args, {}, whole, decides=True)
    else:
        raise CaptureError(f"{model.name!r} cannot be called on symbols: {walker.refusal}")
    if isinstance(outputs, (list, tuple)) and len(outputs) == 1:
        outputs = outputs[0]  # as Keras returns it
    returned = keras.tree.map_structure(lambda flow: scribe.order(flow, moved=False).ref, outputs)
    held = {
        entry.name: Held(
            spec_of(entry.view.apply(entry.variable.value)),
            Source.PARAMETER if entry.name in module._parameters else Source.BUFFER,
            entry.name in module._parameters and entry.is_trained,
        )
        for entry in module.variables
    }
    held |= {name: Held(spec_of(tensor), Source.BUFFER) for name, tensor in scribe.constants.items()}
    return Trace(
        steps=_needed(scribe.steps, returned),
        inputs=example.names,
        specs=example.specs,
        output=returned,
        held=held,
        tied={},
        training=module.training,
        source="keras",
        constants=scribe.constants,
    )


def _needed(steps: Sequence[Step], output: Any) -> tuple[Step, ...]:
    """Leave steps out that nobody reads and that hold no weights: masks that no layer asked for."""
    read = {leaf.id for leaf in leaves(output) if isinstance(leaf, Result)}
    kept = []
    for step in reversed(steps):
        given = leaves((step.args, dict(step.kwargs)))
        if step.id in read or any(isinstance(leaf, Weight) for leaf in given):
            read |= {leaf.id for leaf in given if isinstance(leaf, Result)}
            kept.append(step)
    return tuple(reversed(kept))
