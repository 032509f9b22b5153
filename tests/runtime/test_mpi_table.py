"""Small sums in shared memory, where ranks share cores."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwise.runtime import mpi
from shardwise.runtime.mpi import table
from shardwise.runtime.mpi.shared import open_memory
from shardwise.runtime.wire import wire_of


def sums(ranks: tuple[int, ...]) -> dict[str, object] | None:
    group = dist.new_group(list(ranks))
    rank = dist.get_rank()
    if rank not in ranks:
        return None
    poller = mpi.poller()
    usual, poller.tables = poller.tables, True
    try:
        wire = wire_of(group, ranks)
        found: dict[str, object] = {}
        for turn in range(7):
            parts = [torch.rand(5, 3, dtype=torch.float64, generator=_seeded(turn, r)) for r in ranks]
            mine = parts[ranks.index(rank)].clone()
            wire.all_reduce(mine)
            found[f"sum {turn}"] = mine
            found[f"right {turn}"] = torch.stack([parts[ranks.index(r)] for r in sorted(ranks)]).sum(0)
        first, second = torch.ones(4), torch.full((4,), 2.0)
        # The second one finds the table taken, and travels as a message.
        started = [wire.start_all_reduce(t, "a sum", in_turn=True) for t in (first, second)]
        found["kinds"] = [type(pending).__name__ for pending in started]
        for pending in started:
            pending.wait()
        found["both"] = [first.tolist(), second.tolist()]
        turned = torch.arange(6.0).view(2, 3)
        turned = turned.t().contiguous().t() if rank == ranks[0] else turned
        wire.all_reduce(turned)
        found["turned"] = turned.tolist()
        whole = torch.ones(table.PART_BYTES // 4 + 1)
        found["large"] = type(wire.start_all_reduce(whole, "a sum", in_turn=True)).__name__
        return found
    finally:
        poller.tables = usual


def _seeded(turn: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * turn + rank)


@pytest.mark.parametrize(("size", "ranks"), [(2, (0, 1)), (4, (0, 1, 2, 3)), (4, (3, 1, 2))])
def test_small_sums_are_equal_to_the_last_bit_on_all_ranks(size: int, ranks: tuple[int, ...]) -> None:
    results = [found for found in run_ranks(sums, size, "mpi4py", (ranks,)) if found is not None]
    assert len(results) == len(ranks)
    for found in results:
        for turn in range(7):
            assert torch.equal(found[f"sum {turn}"], found[f"right {turn}"])
        assert found["kinds"] == ["OnTable", "MPIPending"]
        assert found["both"] == [[len(ranks)] * 4, [2.0 * len(ranks)] * 4]
        # One rank keeps its part column by column; all take the same way all the same.
        assert found["turned"] == (len(ranks) * torch.arange(6.0).view(2, 3)).tolist()
        assert found["large"] == "MPIPending"


def test_memory_of_another_host_is_not_taken_for_the_table(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(mmap.PAGESIZE - 16) + b"the right mark..")
    assert open_memory(str(path), mmap.PAGESIZE, b"the right mark..") is not None
    assert open_memory(str(path), mmap.PAGESIZE, b"another mark....") is None
    assert open_memory(str(tmp_path / "nothing"), mmap.PAGESIZE, b"the right mark..") is None
