"""Large sums in shared memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwise.runtime.mpi import shelf
from shardwise.runtime.wire import wire_of


def sums(ranks: tuple[int, ...], dtype: torch.dtype) -> dict[str, object] | None:
    group = dist.new_group(list(ranks))
    rank = dist.get_rank()
    if rank not in ranks:
        return None
    usual = shelf.PART_BYTES, shelf.SMALLEST_BYTES
    shelf.PART_BYTES, shelf.SMALLEST_BYTES = 256, 64
    try:
        wire = wire_of(group, ranks)
        unprepared = wire.start_all_reduce(torch.ones(100, dtype=dtype), "a sum")
        unprepared.wait()
        wire.prepare_sums()
        found: dict[str, object] = {"before": type(unprepared.request).__name__}
        # More parts than there are boards, parts that do not divide by the ranks, and none but a short one.
        sizes = (1000, 97, 64, 33, 700)
        whole = [[_part(n, dtype, 10 * i + r) for r in ranks] for i, n in enumerate(sizes)]
        mine = [parts[ranks.index(rank)].clone() for parts in whole]
        # One rank is late with all of them, and nobody waits before all are started.
        if rank == ranks[0]:
            dist.barrier(group)
        started = [wire.start_all_reduce(tensor, "a sum") for tensor in mine]
        if rank != ranks[0]:
            found["early"] = [pending.done() for pending in started]
            dist.barrier(group)
        for pending in started:
            pending.wait()
        found["kinds"] = [type(pending.request).__name__ for pending in started]
        found["sums"], found["right"] = mine, [torch.stack(parts).sum(0) for parts in whole]
        turned = torch.arange(40.0, dtype=dtype).view(5, 8)
        turned = turned.t().contiguous().t() if rank == ranks[0] else turned
        wire.start_all_reduce(turned, "a sum").wait()
        found["turned"] = turned.tolist()
        half = torch.full((500,), 1.0 + 2**-7, dtype=torch.bfloat16)
        wire.start_all_reduce(half, "a sum").wait()
        found["half"] = half.tolist()
        return found
    finally:
        shelf.PART_BYTES, shelf.SMALLEST_BYTES = usual


def _part(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.rand(count, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "ranks"), [(2, (0, 1)), (4, (0, 1, 2, 3)), (4, (3, 1, 2))])
def test_large_sums_are_equal_to_the_last_bit_on_all_ranks(
    size: int, ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    results = [found for found in run_ranks(sums, size, "mpi4py", (ranks, dtype)) if found is not None]
    assert len(results) == len(ranks)
    for found in results:
        assert found["before"] != "Sum"
        # 33 elements of four bytes are enough for a shelf; all ranks decide by the size alone.
        assert set(found["kinds"]) == {"Sum"}
        for mine, first, right in zip(found["sums"], results[0]["sums"], found["right"], strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, right)
        assert not any(found.get("early", []))
        assert found["turned"] == (len(ranks) * torch.arange(40.0).view(5, 8)).tolist()
        assert found["half"] == [float(torch.tensor(len(ranks) * (1.0 + 2**-7)).bfloat16())] * 500
