"""Small graphs made by hand, for tests that need a network's structure but no network."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shardwise.geometry.access import WHOLE
from shardwise.graph import Graph, Kind, Layer, Operand, Source, TensorSpec

IMAGE = TensorSpec((4, 8, 16, 16))


def layer(
    name: str,
    reads: Sequence[str] = (),
    parameters: Sequence[str] = (),
    *,
    kind: Kind = Kind.ELEMENTWISE,
    spec: TensorSpec = IMAGE,
    flops: int = 1000,
) -> Layer:
    """Make a layer that reads some values of image shape and some parameters."""
    weight = TensorSpec((8, 8))
    operands = [Operand(f"input{i}", r, Source.VALUE, IMAGE, (WHOLE,) * 4) for i, r in enumerate(reads)]
    operands += [Operand("weight", p, Source.PARAMETER, weight, (WHOLE,) * 2) for p in parameters]
    return Layer(name, kind, "relu", tuple(operands), (spec,), forward_flops=flops, backward_flops=2 * flops)


def graph(layers: Sequence[Layer], outputs: Sequence[str] = (), frozen: Sequence[str] = ()) -> Graph:
    """Make a graph with one image input `x` in front of the given layers; the last one is its output."""
    parameters = {p: TensorSpec((8, 8)) for each in layers for p in each.parameters}
    source = Layer("x", Kind.INPUT, "input", outputs=(IMAGE,))
    wanted = tuple(outputs) or layers[-1].name
    return Graph((source, *layers), wanted, parameters, {}, frozen=frozenset(frozen))


def chain(n: int, flops: int = 1000) -> Graph:
    """Make n layers `l0` ... in a row, each with its own weight `w0` ..."""
    return graph([layer(f"l{i}", [f"l{i - 1}" if i else "x"], [f"w{i}"], flops=flops) for i in range(n)])


def with_skips(n: int, skips: int, seed: int) -> Graph:
    """Make a chain with skips between random layers, some integer values and some frozen weights."""
    draw = random.Random(seed)
    layers = []
    for i in range(n):
        reads = [f"l{i - 1}" if i else "x"]
        layers.append((f"l{i}", reads))
    for _ in range(skips):
        a, b = sorted(draw.choices(range(n), k=2))
        if a < b:
            layers[b][1].append(f"l{a}")
    labels = TensorSpec((4,), "int64")
    made = [
        layer(name, reads, [f"w{i}"], spec=labels if i + 1 < n and draw.random() < 0.1 else IMAGE)
        for i, (name, reads) in enumerate(layers)
    ]
    frozen = [f"w{i}" for i in range(n) if draw.random() < 0.2]
    return graph(made, frozen=frozen)
