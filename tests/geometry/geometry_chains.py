"""Random small networks, computed whole and by ranks that hold only what the geometry says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import geometry_brute as brute
import geometry_separable as separable
import numpy as np
from geometry_cases import close, cuts, padded, part, pool, transposed, window

from shardwise.geometry import (
    Access,
    Axis,
    AxisMap,
    Layout,
    Node,
    Padded,
    Resize,
    Same,
    Window,
    halo_bytes,
    held,
    local_box,
    messages,
    owned,
    tiles,
)


class Elementwise(brute.Layer):
    def __init__(self, dims: int) -> None:
        self.maps: tuple[AxisMap, ...] = (Same(),) * dims

    def whole(self, x: brute.Array) -> brute.Array:
        return self.kernel(x)

    def kernel(self, x: brute.Array) -> brute.Array:
        return np.tanh(x) + 0.1


@dataclass
class Net:
    """Nodes with the layers that compute them; a node of several inputs adds them up."""

    dims: int
    rng: random.Random
    nodes: list[Node] = field(default_factory=list)
    layers: dict[str, list[brute.Layer]] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        return next(node.shape for node in self.nodes if node.name == name)

    def add(self, inputs: Sequence[str], layers: Sequence[brute.Layer]) -> str:
        shapes = [self.shape(i) for i in inputs]
        sizes = {
            tuple(m.size(n) for m, n in zip(layer.maps, shape, strict=True))
            for layer, shape in zip(layers, shapes, strict=True)
        }
        assert len(sizes) == 1, sizes
        name = f"v{len(self.nodes)}"
        accesses: list[Access] = [tuple(Axis(d, m) for d, m in enumerate(layer.maps)) for layer in layers]
        self.nodes.append(Node(name, sizes.pop(), tuple(inputs), tuple(accesses)))
        self.layers[name] = list(layers)
        return name


def grow(net: Net, generator: np.random.Generator, length: int) -> None:
    """Append layers and residual blocks until there are `length` values."""
    rng, dims = net.rng, net.dims
    last = net.nodes[0].name

    def conv(*maps: Window) -> brute.Layer:
        return brute.Convolution(maps, generator)

    while len(net.nodes) < length:
        extent = net.shape(last)
        choice = rng.choice(("window", "window", "residual", "residual", "shortcut", "pool", "other", "skip"))
        if max(extent) > (60 if dims == 1 else 14):
            choice = "shortcut"
        if choice == "window":
            last = net.add([last], [conv(*(window(rng, n, small=True) for n in extent))])
        elif choice == "residual":
            kernels = [rng.choice((1, 3, 5)) for _ in extent]
            modes = [rng.choice(("zeros", "replicate", "circular")) for _ in extent]
            same = [Window(k, 1, k // 2, k // 2, mode=m) for k, m in zip(kernels, modes, strict=True)]
            inner = net.add([net.add([last], [conv(*same)])], [Elementwise(dims)])
            inner = net.add([inner], [conv(*same)])
            last = net.add([inner, last], [Elementwise(dims), Elementwise(dims)])
        elif choice == "shortcut":
            # The 1x1 shortcut with stride 2 reads every other pixel only: ownership must not depend on it.
            branch = net.add([last], [conv(*[Window(3, 2, 1, 1)] * dims)])
            short = net.add([last], [conv(*[Window(1, 2)] * dims)])
            last = net.add([branch, short], [Elementwise(dims), Elementwise(dims)])
        elif choice == "pool":
            maps = [pool(rng, n, small=True, dilated=False) for n in extent]
            if rng.random() < 0.5:
                last = net.add([last], [brute.AveragePool(maps, generator, rng.random() < 0.5)])
            else:
                last = net.add([last], [brute.MaxPool(maps, generator)])
        elif choice == "skip":
            older = rng.choice(net.nodes).name
            if net.shape(older) != extent:
                # A U-Net's skip: bring the older value to this size, whatever it was.
                sizes = zip(net.shape(older), extent, strict=True)
                maps_ = [Resize(m, "linear", False, None) for _, m in sizes]
                older = net.add([older], [separable.Interpolation(maps_)])
            last = net.add([last, older], [Elementwise(dims), Elementwise(dims)])
        else:
            layers: list[brute.Layer] = [
                brute.TransposedConvolution([transposed(rng, n, small=True) for n in extent], generator),
                separable.Interpolation([Resize(2 * n, "nearest", False, None) for n in extent]),
                brute.Slice([part(rng, n) for n in extent]),
                brute.Pad([padded(rng, n) for n in extent], 0.0),
                brute.Pad([Padded(1, 1, "replicate") for n in extent], 0.0),
            ]
            last = net.add([last], [rng.choice(layers)])


def network(dims: int, rng: random.Random) -> tuple[Net, np.ndarray]:
    generator = np.random.default_rng(rng.getrandbits(32))
    extent = tuple(rng.randint(4, 30 if dims == 1 else 9) for _ in range(dims))
    net = Net(dims, rng, [Node("v0", extent)], {"v0": []})
    grow(net, generator, rng.randint(4, 9))
    return net, generator.standard_normal(extent)


def whole_values(net: Net, x: np.ndarray) -> dict[str, np.ndarray]:
    values = {"v0": x}
    for node in net.nodes[1:]:
        terms = [layer.whole(values[i]) for layer, i in zip(net.layers[node.name], node.inputs, strict=True)]
        values[node.name] = np.sum(terms, axis=0) if len(terms) > 1 else terms[0]
    return values


def random_layout(rng: random.Random, shape: Sequence[int], grid: Sequence[int]) -> Layout:
    return tiles(shape, grid, bounds=[cuts(rng, n, g) for n, g in zip(shape, grid, strict=True)])


def check_network(dims: int, rng: random.Random) -> int:
    """Run a random network on random tiles with random exchanges; return how many parts were compared."""
    net, x = network(dims, rng)
    values = whole_values(net, x)
    grid = [rng.randint(1, 5 if dims == 1 else 2) for _ in range(dims)]
    given = {"v0": random_layout(rng, x.shape, grid)}
    if rng.random() < 0.3:
        moved = rng.choice(net.nodes)
        given[moved.name] = random_layout(rng, moved.shape, grid)
    owns = owned(net.nodes, given)
    exchanges = {n.name for n in net.nodes if rng.random() < rng.choice((0.0, 0.3, 1.0))}
    plan = held(net.nodes, owns, exchanges)
    at_hand: dict[str, dict[int, np.ndarray]] = {}
    compared = 0
    for node in net.nodes:
        layout = plan.made[node.name]
        parts: dict[int, np.ndarray] = {}
        for rank, out in zip(layout.ranks, layout.boxes, strict=True):
            assert out.contains(owns[node.name].box(rank))
            if out.empty or not node.inputs:
                parts[rank] = values[node.name][out.slices()]
                continue
            terms = []
            for layer, source, access in zip(net.layers[node.name], node.inputs, node.accesses, strict=True):
                box = plan.at_hand(source).box(rank)
                windows = local_box(access, values[source].shape, out, box)
                terms.append(layer.part(at_hand[source][rank], windows, out, box.lo))
            parts[rank] = np.sum(terms, axis=0) if len(terms) > 1 else terms[0]
            assert close(parts[rank], values[node.name][out.slices()]), (net.nodes, node.name, rank)
            compared += 1
        if node.name in exchanges:
            parts = exchange(layout, plan.wanted[node.name], parts)
        at_hand[node.name] = parts
    return compared


def exchange(made: Layout, wanted: Layout, parts: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    result = {r: np.zeros(box.shape) for r, box in zip(wanted.ranks, wanted.boxes, strict=True)}
    received = dict.fromkeys(wanted.ranks, 0)
    for m in messages(made, wanted):
        piece = parts[m.source][m.box.slices(made.box(m.source))]
        result[m.target][m.box.slices(wanted.box(m.target))] += piece
        received[m.target] += piece.nbytes if m.source != m.target else 0
    assert received == halo_bytes(made, wanted, 8)
    return result
