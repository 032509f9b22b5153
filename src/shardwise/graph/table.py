"""Graphs and coverages as tables to read."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from shardwise.graph.graph import Graph
from shardwise.graph.layer import Kind, Layer

if TYPE_CHECKING:
    from shardwise.graph.coverage import Coverage

_UNITS = ("", "k", "M", "G", "T", "P")


def count(number: float, base: int = 1000) -> str:
    """Write a number with three digits and a unit: 8.18 G."""
    unit = 0
    while abs(number) >= base and unit < len(_UNITS) - 1:
        number, unit = number / base, unit + 1
    return f"{number:.3g} {_UNITS[unit]}".rstrip() if unit else f"{number:.0f}"


def shape(sizes: tuple[int, ...]) -> str:
    """Write a shape: 1x64x56x56."""
    return "x".join(map(str, sizes)) or "scalar"


def geometry(layer: Layer) -> str:
    """Write kernel, stride, padding, dilation and groups of a layer, where they are not trivial."""
    a = layer.attributes
    if "kernel" not in a:
        return ""
    parts = ["k" + _each(a["kernel"])]
    if set(a["stride"]) != {1}:
        parts.append("s" + _each(a["stride"]))
    pads = [p if isinstance(p, int) else p[0] if p[0] == p[1] else f"{p[0]}+{p[1]}" for p in a["padding"]]
    if set(pads) != {0}:
        parts.append("p" + _each(pads))
    if set(a["dilation"]) != {1}:
        parts.append("d" + _each(a["dilation"]))
    if a.get("groups", 1) != 1:
        parts.append(f"g{a['groups']}")
    return " ".join(parts)


def _each(values: object) -> str:
    items = [str(v) for v in values]  # type: ignore[attr-defined]
    return items[0] if len(set(items)) == 1 else "x".join(items)


def graph_table(graph: Graph) -> str:
    """Return the layer table of a graph, with totals."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("layer", "kind", "op", "geometry", "output"):
        table.add_column(name, no_wrap=True)
    for name in ("parameters", "flops", "backward", "saved bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    seen: set[str] = set()
    for layer in graph:
        fresh = [o for o in layer.operands if o.source in graph.parameters and o.source not in seen]
        seen.update(o.source for o in fresh)
        parameters = sum(o.spec.numel for o in {o.source: o for o in fresh}.values())
        output = ", ".join(shape(spec.shape) for spec in layer.outputs)
        numbers = [count(n) if n else "" for n in (parameters, layer.forward_flops, layer.backward_flops)]
        saved = count(layer.saved_bytes, 1024) if layer.saved_bytes else ""
        table.add_row(layer.name, layer.kind.value, layer.op, geometry(layer), output, *numbers, saved)
    return _render(table) + "\n" + summary(graph)


def summary(graph: Graph) -> str:
    """Return the totals of a graph in a few lines."""
    forward = sum(layer.forward_flops for layer in graph)
    backward = sum(layer.backward_flops for layer in graph)
    parameters = sum(spec.numel for spec in graph.parameters.values())
    opaque = [layer for layer in graph if layer.kind is Kind.OTHER]
    known = sum(layer.forward_flops for layer in graph if layer.kind is not Kind.OTHER)
    share = known / forward if forward else 1.0
    lines = [
        f"{len(graph)} layers ({graph.source}, {'training' if graph.training else 'evaluation'}), "
        f"{count(parameters)} parameters, {count(forward)} flops forward, {count(backward)} backward, "
        f"{count(graph.saved_bytes, 1024)} bytes saved for backward",
        f"{share:.1%} of the flops in layers of known kinds, {len(opaque)} opaque layers",
    ]
    return "\n".join((*lines, *graph.notes))


def coverage_table(coverage: Coverage) -> str:
    """Return which splits each layer allows, and the shares of the work."""
    from shardwise.graph.coverage import SPLITS

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("layer", "kind", *SPLITS, "flops", "gathered", "reason"):
        table.add_column(name, no_wrap=name != "reason")
    total = max(1, sum(layer.flops for layer in coverage.layers))
    for layer in coverage.layers:
        marks = ["yes" if split in layer.splits else "-" for split in SPLITS]
        gathered = f"{count(layer.gathered_bytes, 1024)}B" if layer.gathered_bytes else ""
        cost = (f"{layer.flops / total:.1%}", gathered)
        table.add_row(layer.name, layer.kind.value, *marks, *cost, layer.reason)
    whole = [layer for layer in coverage.layers if layer.gathered_bytes]
    shares = ", ".join(f"{split} {coverage.share(split):.1%}" for split in SPLITS)
    return (
        f"{_render(table)}\nof the flops can be split by: {shares}\n"
        f"{coverage.known_flops:.1%} of the flops in layers of known kinds, "
        f"{len(coverage.opaque)} opaque layers\n"
        f"tiles are gathered for {len(whole)} layers, {count(sum(x.gathered_bytes for x in whole), 1024)}B a "
        f"forward pass, and {sum(x.flops for x in whole) / total:.1%} of the flops repeated on every rank"
    )


def _render(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    return textwrap.dedent("\n".join(lines))
