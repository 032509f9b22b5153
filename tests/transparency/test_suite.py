"""Split equals unsplit: loss, input gradient, every gradient, statistics and weights after three steps."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.plan import Plan
from shardwise.program import Regrid
from shardwise.program.lowered import lower
from transparency.cases import (
    DEEPER,
    DEEPEST,
    OTHERS,
    RANDOM_SEEDS,
    SPLITS,
    ZOO,
    Point,
    dims,
    product,
    subset,
)
from transparency.harness import _graph as captured
from transparency.harness import check
from transparency.record import record, summarise

CHOSEN = subset()


@pytest.mark.parametrize("point", CHOSEN, ids=lambda p: p.id)
def test_split_equals_one_device(point: Point) -> None:
    check(point.case, point.transport)


@pytest.mark.full
@pytest.mark.parametrize("point", product(), ids=lambda p: p.id)
def test_whole_product_equals_one_device(point: Point) -> None:
    record(point.id, point.transport, lambda: check(point.case, point.transport, deadline=250.0))


@pytest.mark.full
def test_whole_product_is_recorded() -> None:
    text = summarise(point.id for point in product())
    assert f"{len(product())} of {len(product())} cases" in text


def test_the_default_suite_meets_every_random_network_and_every_split() -> None:
    assert {p.model for p in CHOSEN if p.model.startswith("random")} == {f"random{s}" for s in RANDOM_SEEDS}
    assert {p.split for p in CHOSEN} == {*SPLITS[2], *SPLITS[3]}
    assert {(p.halo, p.transport) for p in CHOSEN} >= {("fused", "gloo"), ("fused", "mpi4py")}


def exchanges(model: str, split: str, halo: str) -> int:
    case = Point(model, split, halo, 1, "gloo").case
    stage = lower(captured(case.alone), Plan.parse(case.plan)).stage(0, 0, 0)
    return sum(isinstance(op, Regrid) for op in stage.ops)


@pytest.mark.parametrize("model", ["random1", "unet", "vgg16", "resnet18"])
@pytest.mark.parametrize("split", ["spatial=2x1", "spatial=2x2"])
def test_fused_cases_exchange_less_often(model: str, split: str) -> None:
    assert 0 < exchanges(model, split, "fused") < exchanges(model, split, "layer")


@pytest.mark.parametrize("model", ["unet3d", "cosmoflow-32"])
def test_fused_volumes_exchange_less_often(model: str) -> None:
    split = "spatial=2x2x2"
    assert 0 < exchanges(model, split, "fused") < exchanges(model, split, "layer")


def test_every_random_network_exchanges_something() -> None:
    for seed in RANDOM_SEEDS:
        split = SPLITS[dims(f"random{seed}")][0]
        assert exchanges(f"random{seed}", split, "layer"), seed


def test_the_product_is_what_it_says() -> None:
    models = {*ZOO, *(f"random{seed}" for seed in RANDOM_SEEDS)}
    found = Counter(p.model for p in product())
    assert found.keys() == models
    assert {dims(model) for model in models} == {2, 3}
    for model, count in found.items():
        layouts = 2 * (len(SPLITS[dims(model)]) - len(OTHERS)) + len(OTHERS)
        assert count == layouts * (1 if model == DEEPEST else 2 if model in DEEPER else 4)
