"""What a command is asked about: a network by name with its loss, a machine, sizes with units."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from shardwise.graph import Graph

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


def parse_shape(text: str) -> tuple[int, ...]:
    """Read `3x1024x1024`."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ValueError(f"input: {text!r} found; write sizes of one sample such as 3x1024x1024")
    return tuple(int(n) for n in text.split("x"))


def parse_bytes(text: str | None) -> float | None:
    """Read `16GB` or `512MiB`."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"memory: {text!r} found; write a number with a unit such as 16GB or 512MiB")
    return float(match[1]) * _UNITS[match[2].lower()]


def build_model(name: str, device: str | None = "meta", **settings: Any) -> nn.Module:
    """Return a model of the zoo, or `module:attribute` (a module, or a callable that makes one)."""
    import torch
    from torch import nn

    from shardwise import zoo

    with torch.device(device) if device else torch.device("cpu"):
        if ":" not in name:
            return zoo.build(name, **settings)
        where, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(where), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"model: {name!r} cannot be imported ({error})") from error
        model = found if isinstance(found, nn.Module) else found(**settings)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {name!r} makes a {type(model).__name__}; a torch.nn.Module is needed")
    return model


def sample_shape(name: str, given: str | None) -> tuple[int, ...]:
    """Return the shape of one sample: as given, or a zoo model's usual one."""
    from shardwise import zoo

    if given is not None:
        return parse_shape(given)
    if ":" in name:
        raise ValueError(f"input: {name!r} has no usual size; give --input, such as 3x224x224")
    return zoo.input_shape(name)


def training_graph(model: nn.Module, shape: Sequence[int], batch: int) -> Graph:
    """Capture a model with a loss that suits its output, without any memory for its tensors.

    Classes (one vector, or one per pixel, of integers' targets) are the usual case; a model that makes
    anything else than one tensor is priced without a loss.
    """
    import torch

    from shardwise.graph import capture
    from shardwise.graph.attach import attach
    from shardwise.graph.loss import capture_loss

    x = torch.empty((batch, *shape), device="meta")
    graph = capture(model, x, training=True, check=False)
    if len(graph.output_names) != 1:
        return graph
    made = graph[graph.output_names[0]].shape
    target = torch.empty((made[0], *made[2:]), dtype=torch.long, device="meta")
    loss = torch.nn.CrossEntropyLoss()
    if len(made) < 2 or made[1] < 2:
        target, loss = torch.empty(made, device="meta"), torch.nn.MSELoss()  # type: ignore[assignment]
    return attach(graph, capture_loss(loss, graph.output_specs, target, check=False))
