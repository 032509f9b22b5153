"""Large worlds are searched within seconds and little memory."""

import sys
from pathlib import Path

import pytest

from shardwise.oracle.search.space import SCHEDULES, candidates, sizes

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "oracle"


@pytest.mark.full
def test_resnet_1001_on_2048_ranks_within_ten_seconds_and_a_gigabyte(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    monkeypatch.delitem(sys.modules, "search", raising=False)
    import search as benchmark

    found = benchmark.alone("resnet1001v2", 224, 2048, 2048)
    assert found["seconds"] <= 10
    assert found["peak_gigabytes"] < 1
    enumerated, refused, pruned, simulated = found["counts"]
    assert enumerated == refused + pruned + simulated
    assert simulated >= 10


def test_all_factorisations_of_2048_are_there():
    found = {(c.data, c.stages, str(c.split)) for c in candidates(2048, 2) if not c.singles}
    powers = [1 << k for k in range(12)]
    assert set(powers) <= set(sizes(2048))
    for stages in powers:
        for width in powers[1:]:
            if stages * width <= 2048:
                data = 2048 // stages // width
                for split in (f"filter:{width}", f"channel:{width}", f"1x{width}", f"{width}x1"):
                    assert (data, stages, split) in found
    tiled_first = [c for c in candidates(2048, 2) if c.singles]
    assert {c.schedule for c in tiled_first} == set(SCHEDULES)
