"""Compare a captured graph with Keras itself.

In training a network can be chaotic: batch norm over two values turns rounding errors into other signs. So a
difference is held against what the model itself makes of its inputs with the last bits changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import torch
from torch import Tensor

from shardwise.graph import functional, interpret
from shardwise.graph.capture import untouched
from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example
from shardwise.graph.graph import Graph
from shardwise.graph.keras.module import KerasModule, same_device, without_dropout
from shardwise.graph.layer import Kind, Layer

_BITS = 8
"""How many units in the last place the inputs are changed by, to see what becomes of it."""
_MARGIN = 100.0
_SINGLE = 1e-4
"""What rounding may do in single precision, which Keras on torch uses here and there for float64 too.
Averages of batch norm may cancel to almost nothing, so they may be off by more."""


def check(module: KerasModule, example: Example, graph: Graph) -> None:
    """Refuse a graph that does not compute what the Keras model computes, dropout aside."""
    inputs = list(example.sample(same_device(module.model)).values())
    plain = replace(graph, layers=tuple(map(_undropped, graph.layers)))
    state = interpret.state_of(module)
    with without_dropout(module.model):  # also inside of layers that run whole
        found = _results(module, lambda xs: interpret.run(plain, xs, state), inputs)
        wanted = _results(module, lambda xs: module(*xs), inputs)
        wrong = {n: d for n, d in _differences(wanted, found).items() if not d <= _rounding(n, wanted[n])}
        if not wrong:
            return
        nearby = _results(module, lambda xs: module(*xs), [_disturbed(x) for x in inputs])
    own = _differences(wanted, nearby)
    for name, difference in wrong.items():
        if not difference <= _MARGIN * own[name]:
            raise CaptureError(
                f"the captured graph does not reproduce {name}: off by {difference:.3g} of its size"
            )


def _results(
    module: KerasModule, run: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Run once and return outputs and changed buffers by name; the model is left as it was."""
    with untouched(module), torch.no_grad():
        outputs = keras.tree.flatten(run([x.clone() for x in inputs]))
        result = {f"output {i}": tensor.detach().clone() for i, tensor in enumerate(outputs)}
        result |= {f"the buffer {name!r}": buffer.clone() for name, buffer in module.named_buffers()}
    return result


def _differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """Return relative differences by name."""
    result = {}
    for name, a in wanted.items():
        b = found[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise CaptureError(
                f"the captured graph gives {name} as {b.dtype} {tuple(b.shape)}, not {tuple(a.shape)}"
            )
        scale = max(float(a.double().abs().max()) if a.numel() else 0.0, 1e-6)
        result[name] = float((a.double() - b.double()).abs().max()) / scale if a.numel() else 0.0
    return result


def _rounding(name: str, tensor: Tensor) -> float:
    return (_SINGLE if tensor.is_floating_point() else 0.0) * (100 if "buffer" in name else 1)


def _disturbed(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
    return tensor * (1 + signs * _BITS * torch.finfo(torch.float32).eps)


def _undropped(layer: Layer) -> Layer:
    if layer.kind is not Kind.DROPOUT or layer.call is None:
        return layer
    return replace(layer, call=replace(layer.call, target=functional.identity, args=layer.call.args[:1]))
