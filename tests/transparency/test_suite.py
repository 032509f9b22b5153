"""Split equals unsplit: loss, input gradient, every gradient, statistics and weights after three steps."""

from __future__ import annotations

import pytest

from transparency.cases import OTHERS, RANDOM_SEEDS, SPLITS, ZOO, Point, dims, product, subset
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


def test_the_product_is_what_it_says() -> None:
    models = {*ZOO, *(f"random{seed}" for seed in RANDOM_SEEDS)}
    assert {p.model for p in product()} == models
    three = sum(dims(model) == 3 for model in models)
    grids = {nd: len(SPLITS[nd]) - len(OTHERS) for nd in (2, 3)}
    layouts = {nd: 2 * grids[nd] + len(OTHERS) for nd in (2, 3)}
    assert len(product()) == 4 * ((len(models) - three) * layouts[2] + three * layouts[3])
