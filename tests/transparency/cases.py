"""The product of models, splits, halos, sizes and transports; and the part of it that covers all pairs.

model      every zoo model, small and narrow, and twenty random networks
split      tile grids, filter, channel, pairs of them, and batch
halo       exchanged before each layer, or fused over chains (tiles only); over three layers whatever that
           costs where sizes are odd
size       even, or odd so that no tile is like another; odd ones are tiled down to the last layer that can
           be, and their images lie in memory with channels last
transport  Gloo and MPI
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ranks import TRANSPORTS
from transparency.harness import Case
from transparency.models import RANDOM_SIZES, ZOO, random_dims

RANDOM_SEEDS = range(20)
OTHERS = ("filter=2", "channel=2", "pairs=2", "batch=2")
SPLITS = {
    2: (*(f"spatial={grid}" for grid in ("2x1", "3x1", "2x2", "1x4")), *OTHERS),
    3: (*(f"spatial={grid}" for grid in ("2x1x1", "1x1x3", "2x2x2")), *OTHERS),
}
HALOS = ("layer", "fused")
SIZES = (0, 1)
# Others of families that the default suite meets; `make test-full` has them.
DEEP = (
    *("resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnet20", "resnet56", "resnet110", "resnet110v2", "resnet1001v2"),
)
# Hundreds and thousands of layers, all of which other members of their families have too.
DEEPER = ("resnet101", "resnet152", "resnet110", "resnet110v2")
DEEPEST = "resnet1001v2"


@dataclass(frozen=True)
class Point:
    """One point of the product."""

    model: str
    split: str
    halo: str
    size: int
    transport: str

    @property
    def case(self) -> Case:
        """Return the comparison that this point stands for."""
        halo = "3" if self.halo == "fused" and self.size else self.halo
        plan = self.split if halo == "layer" else f"{self.split} halo={halo}"
        order = "last" if self.size else "auto"
        if self.size and self.split.startswith("spatial"):
            # Tile to the end, down to tiles of one pixel or none, where the rule of `auto` would stop.
            plan += " tail=batch"
        if self.model.startswith("random"):
            seed = int(self.model.removeprefix("random"))
            size = RANDOM_SIZES[random_dims(seed)][self.size]
            settings = (("seed", seed), ("size", size))
            return Case("random", (3, 3, *size), plan, "mse", settings, order=order)
        _, sizes, loss = ZOO[self.model]
        return Case(self.model, sizes[self.size], plan, loss, order=order)

    @property
    def id(self) -> str:
        """Return a name that can be read and looked up."""
        size = "odd" if self.size else "even"
        return f"{self.model}-{self.split}-{self.halo}-{size}-{self.transport}"


# Eight ranks on two cores take their time: the default suite meets them once.
EIGHT = Point("unet3d", "spatial=2x2x2", "fused", 1, "mpi4py")
# Of the deep ones it meets bottlenecks, and images that shrink little.
SOME_DEEP = (
    Point("resnet50", "spatial=2x2", "fused", 1, "mpi4py"),
    Point("resnet50", "channel=2", "layer", 0, "gloo"),
    Point("resnet20", "spatial=3x1", "layer", 1, "gloo"),
)


def dims(model: str) -> int:
    """Return how many spatial dimensions a model's images have."""
    if model.startswith("random"):
        return random_dims(int(model.removeprefix("random")))
    return len(ZOO[model][1][0]) - 2


def points(model: str) -> Iterator[Point]:
    """List the product for one model; the deeper ones meet the transports in turn, not each time both."""
    settings = [
        (split, halo)
        for split, halo in itertools.product(SPLITS[dims(model)], HALOS)
        if halo == "layer" or split.startswith("spatial")
    ]
    sizes = SIZES[1:] if model == DEEPEST else SIZES
    for (i, (split, halo)), size in itertools.product(enumerate(settings), sizes):
        both = model != DEEPEST and model not in DEEPER
        for transport in TRANSPORTS if both else [TRANSPORTS[(i + size) % 2]]:
            yield Point(model, split, halo, size, transport)


def product() -> list[Point]:
    """Return all points."""
    models = [*ZOO, *(f"random{seed}" for seed in RANDOM_SEEDS)]
    return [point for model in models for point in points(model)]


def pairs(point: Point) -> set[tuple[str, object, str, object]]:
    """Return every pair of settings that a point has."""
    values = [(name, getattr(point, name)) for name in ("model", "split", "halo", "size", "transport")]
    return {(*a, *b) for a, b in itertools.combinations(values, 2)}


def covering(candidates: list[Point]) -> list[Point]:
    """Choose points until every pair of settings that occurs occurs in one of them."""
    rng = random.Random(0)
    left = set().union(*map(pairs, candidates))
    chosen: list[Point] = []
    while left:
        sample = [p for p in candidates if p not in chosen]
        best = max(rng.sample(sample, min(len(sample), 60)), key=lambda p: len(pairs(p) & left))
        if pairs(best) & left:
            chosen.append(best)
            left -= pairs(best)
    return chosen


def slow(point: Point) -> bool:
    """Tell whether a point is left to the whole product: many small layers over four ranks on two cores."""
    return point.model.startswith("amoebanet") and point.transport == "gloo" and point.case.ranks > 2


def subset() -> list[Point]:
    """Return the default suite: all pairs over the models that are not too deep and the splits of few ranks.

    Some of the models are random networks; each time one of them is chosen it is another one.
    """
    models = [name for name in ZOO if name not in DEEP] + ["random0", "random1", "random4"]
    chosen = covering(
        [p for model in models for p in points(model) if p.split != EIGHT.split and not slow(p)]
    )
    seeds = {nd: itertools.cycle([s for s in RANDOM_SEEDS if random_dims(s) == nd]) for nd in SPLITS}
    # In the order of models, so that ranks can reuse what they know of one.
    chosen.sort(key=lambda point: (models.index(point.model), point.size))
    return [
        *(
            replace(point, model=f"random{next(seeds[dims(point.model)])}")
            if point.model.startswith("random")
            else point
            for point in chosen
        ),
        *SOME_DEEP,
        EIGHT,
    ]
