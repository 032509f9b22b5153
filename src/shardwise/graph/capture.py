"""From a model and an example to its graph: trace, describe, check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.graph import interpret
from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example, read_example
from shardwise.graph.fake import Fakes
from shardwise.graph.foreign import Foreign, adapt
from shardwise.graph.graph import Graph, Shapes
from shardwise.graph.propagate import propagate
from shardwise.graph.quiet import quiet
from shardwise.graph.trace import Trace, leaves
from shardwise.graph.trace_export import trace_export
from shardwise.graph.trace_fx import trace_fx
from shardwise.graph.uneven import may_decide

OPAQUE_FLOPS = 0.02
"""How much of the work may hide in opaque modules before another tracer is tried."""


def capture(model: nn.Module, example: Any, *, training: bool | None = None, check: bool = True) -> Graph:
    """Capture a model as a graph of layers.

    Args:
        model: any module or Keras model, also on the meta device; it is left exactly as it was.
        example: a tensor, a tuple of them, or a dict by argument name; a `TensorSpec` stands for a tensor.
        training: which behaviour to capture; default as the model is now.
        check: compare the graph's output with the model's on the example (never possible on meta).
    """
    model = adapt(model)
    if isinstance(model, Foreign):
        wanted = model.training if training is None else training
        return model.capture(example, training=wanted, check=check)
    given = read_example(model.forward, example)
    with untouched(model, training):
        checked = check and not _on_meta(model) and given.real
        graph = _best(model, given, checked)
    if not checked:
        why = "not wanted" if not check else "there is no data on the meta device"
        graph = _with_note(graph, f"self-check skipped: {why}")
    return graph


def _best(model: nn.Module, example: Example, check: bool) -> Graph:
    """Try fx, then export where fx leaves much of the work in modules that it could not enter."""
    try:
        first = _attempt(trace_fx, model, example, check)
    except CaptureError as refusal:
        return _last_resort(model, example, check, refusal)
    if opaque_fraction(first) <= OPAQUE_FLOPS:
        return first
    try:
        second = _attempt(trace_export, model, example, check)
    except CaptureError as refusal:
        return _with_note(first, f"torch.export cannot enter the opaque modules either: {refusal.what}")
    return second if opaque_fraction(second) < opaque_fraction(first) else first


def _last_resort(model: nn.Module, example: Example, check: bool, refusal: CaptureError) -> Graph:
    try:
        return _attempt(trace_export, model, example, check)
    except CaptureError as second:
        what = refusal.what
        if second.what != what:
            what = f"{what} (torch.export: {second.what})"
        raise CaptureError(what, refusal.where or second.where) from second


def _attempt(
    trace: Callable[[nn.Module, Example], Trace], model: nn.Module, example: Example, check: bool
) -> Graph:
    with untouched(model):
        with quiet():
            graph = build(trace(model, example))
        if check:
            self_check(model, example, graph)
    return graph


def opaque_fraction(graph: Graph) -> float:
    """Return the share of the flops that lies in modules which could not be entered."""
    total = sum(layer.forward_flops for layer in graph)
    hidden = sum(layer.forward_flops for layer in graph if layer.op == "module")
    return hidden / total if total else 0.0


def _with_note(graph: Graph, note: str) -> Graph:
    return replace(graph, notes=(*graph.notes, note))


def build(trace: Trace) -> Graph:
    """Return the graph of a trace for its own shapes; `Graph.at` then serves others from the same trace."""
    return Rebuild(trace)(tuple(spec.shape for spec in trace.specs))


class Rebuild:
    """Make the graph of a trace for any input shapes, each once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = replace(trace, fakes=None)
        self.fakes: Fakes | None = trace.fakes
        self.known: dict[Shapes, Graph] = {}

    @property
    def decides(self) -> bool:
        """Tell whether the model may go other ways, or does not work, for some shapes."""
        return self.trace.refuse is not None or any(map(may_decide, self.trace.steps))

    def __call__(self, shapes: Shapes) -> Graph:
        """Return the graph for these shapes."""
        if shapes not in self.known:
            if self.fakes is None:
                self.fakes = Fakes(self.trace.modules)
            self.known[shapes] = replace(propagate(self.trace, shapes, self.fakes), rebuild=self)
        return self.known[shapes]

    def __getstate__(self) -> dict[str, Any]:
        # What was run without data cannot be pickled, and is quickly run again.
        return {"trace": self.trace, "fakes": None, "known": {}}


@contextmanager
def untouched(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Restore buffers, training flags and random numbers of a model, whatever happens inside."""
    flags = {module: module.training for module in model.modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=_devices(model)):
        try:
            if training is not None and training != model.training:
                model.train(training)
            yield
        finally:
            for module, flag in flags.items():
                module.training = flag
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])


def _devices(model: nn.Module) -> list[torch.device]:
    found = {t.device for t in (*model.parameters(), *model.buffers())}
    return [device for device in found if device.type not in ("cpu", "meta")]


def _on_meta(model: nn.Module) -> bool:
    return any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers()))


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def self_check(model: nn.Module, example: Example, graph: Graph) -> None:
    """Refuse a graph that does not compute what the model computes on the example."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    sample = example.sample(device)
    args, kwargs = example.fill({name: tensor.clone() for name, tensor in sample.items()})
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = interpret.state_of(model)
    with torch.no_grad():
        torch.manual_seed(0)
        found = interpret.run(graph, list(sample.values()), state, dict(model.named_modules()))
        updated = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(start[name])
        torch.manual_seed(0)
        wanted = model(*args, **kwargs)
    pairs = list(zip(leaves(_plain(wanted)), leaves(_plain(found)), strict=True))
    for i, (a, b) in enumerate(pairs):
        if not _close(a, b):
            raise CaptureError(f"the captured graph does not reproduce output {i} of the model: {_how(a, b)}")
    for name, buffer in model.named_buffers():
        if not _close(buffer, updated[name]):
            raise CaptureError(
                f"the model changes its buffer {name!r} in a way that the captured graph does not reproduce"
            )


def _plain(tree: Any) -> Any:
    return tree


def _close(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    scale = float(a.abs().nan_to_num().max()) if a.numel() else 0.0
    bound = _TOLERANCE[a.dtype] * max(scale, 1e-6)
    return torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True)


def _how(a: Any, b: Any) -> str:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.is_floating_point():
        return f"they differ by up to {float((a - b).detach().abs().max()):.3g}"
    return f"{getattr(a, 'shape', a)} against {getattr(b, 'shape', b)}"
