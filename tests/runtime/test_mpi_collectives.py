"""Every collective of the mpi4py backend, over dtypes, against values computed without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ranks import run_ranks

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
MOVABLE = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn)
SIZES = (2, 3)

# torch 2.13 renamed both and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def value(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """Return small numbers that differ between ranks and add up exactly in every dtype."""
    count = torch.Size(shape).numel()
    base = (torch.arange(count) % 3 + rank + 1).reshape(shape)
    return (base % 2 == 0) if dtype == torch.bool else base.to(dtype)


def everyone(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return torch.stack([value(rank, dtype, shape) for rank in range(dist.get_world_size())])


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and bool((found.float() == expected.float()).all())


REFERENCE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda parts: parts.sum(0),
    ReduceOp.AVG: lambda parts: parts.sum(0) / parts.shape[0],
    ReduceOp.PRODUCT: lambda parts: parts.prod(0),
    ReduceOp.MIN: lambda parts: parts.amin(0),
    ReduceOp.MAX: lambda parts: parts.amax(0),
}
BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def reduce_everything() -> list[str]:
    wrong = []
    for dtype in (*FLOATS, *INTEGERS):
        for op, reference in REFERENCE.items():
            tensor = value(dist.get_rank(), dtype)
            dist.all_reduce(tensor, op)
            wide = everyone(dtype).to(torch.float64 if dtype.is_floating_point else torch.int64)
            expected = reference(wide)
            expected = expected.trunc() if not dtype.is_floating_point else expected
            if not same(tensor, expected.to(dtype)):
                wrong.append(f"{dtype} {op}")
    for dtype in INTEGERS:
        for op, combine in BITWISE.items():
            tensor = value(dist.get_rank(), dtype)
            dist.all_reduce(tensor, op)
            expected = value(0, dtype)
            for rank in range(1, dist.get_world_size()):
                expected = combine(expected, value(rank, dtype))
            if not same(tensor, expected):
                wrong.append(f"{dtype} {op}")
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_gives_the_reduction_for_every_op_and_dtype(size: int) -> None:
    assert run_ranks(reduce_everything, size) == [[]] * size


def reduce_unusual() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    flags = torch.tensor([rank == 0, True, False])
    either, both = flags.clone(), flags.clone()
    dist.all_reduce(either, ReduceOp.SUM)
    dist.all_reduce(both, ReduceOp.PRODUCT)
    wave = torch.full((2,), complex(rank + 1, 1), dtype=torch.complex128)
    dist.all_reduce(wave)
    group = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(0.5)
    scaled = torch.full((3,), 4.0)
    group.allreduce([scaled], options).wait()
    strided = torch.zeros(4, 6)[:, ::2]
    strided += rank + 1
    dist.all_reduce(strided)
    empty = torch.zeros(0, 3)
    dist.all_reduce(empty)
    total = sum(range(1, size + 1))
    return {
        "bool sum is or": either.tolist() == [True, True, False],
        "bool product is and": both.tolist() == [False, True, False],
        "complex": wave.tolist() == [complex(total, size)] * 2,
        "premultiplied sum": scaled.tolist() == [2.0 * size] * 3,
        "non-contiguous": bool((strided == total).all()),
        "empty": empty.shape == (0, 3),
    }


def test_all_reduce_of_bool_complex_scaled_strided_and_empty_tensors() -> None:
    for found in run_ranks(reduce_unusual, 3):
        assert all(found.values()), found


def refused_reductions() -> list[str]:
    messages = []
    for dtype, op in ((torch.float32, ReduceOp.BAND), (torch.float8_e4m3fn, ReduceOp.SUM)):
        try:
            dist.all_reduce(torch.zeros(2).to(dtype), op)
        except (TypeError, ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def test_reductions_without_meaning_are_refused_by_name() -> None:
    for bitwise, eight_bits in run_ranks(refused_reductions, 2):
        assert "BAND" in bitwise
        assert "float32" in bitwise
        assert "float8" in eight_bits.lower()


def move_everything() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in MOVABLE:
        every = [value(r, dtype) for r in range(size)]
        checks: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        sent = value(rank, dtype)
        dist.broadcast(sent, src=size - 1)
        checks["broadcast"] = ([sent], [every[-1]])
        listed = [torch.empty_like(sent) for _ in range(size)]
        dist.all_gather(listed, value(rank, dtype))
        checks["all_gather"] = (listed, every)
        into = torch.empty((2 * size, 3), dtype=dtype)
        all_gather_single(into, value(rank, dtype))
        checks["all_gather_into_tensor"] = (list(into.split(2)), every)
        gathered = [torch.empty_like(sent) for _ in range(size)] if rank == 1 else None
        dist.gather(value(rank, dtype), gathered, dst=1)
        checks["gather"] = (gathered or every, every)
        part = torch.empty_like(sent)
        dist.scatter(part, every if rank == 0 else None, src=0)
        checks["scatter"] = ([part], [every[rank]])
        targets = [torch.empty_like(sent) for _ in range(size)]
        dist.all_to_all(targets, [value(rank + 2 * to, dtype) for to in range(size)])
        checks["all_to_all"] = (targets, [value(r + 2 * rank, dtype) for r in range(size)])
        single = torch.empty((size, 3), dtype=dtype)
        dist.all_to_all_single(single, torch.cat([value(rank + to, dtype, (1, 3)) for to in range(size)]))
        checks["all_to_all_single"] = (
            [single],
            [torch.cat([value(r + rank, dtype, (1, 3)) for r in range(size)])],
        )
        passed = torch.empty_like(sent)
        right, left = (rank + 1) % size, (rank - 1) % size
        jobs = [dist.P2POp(dist.irecv, passed, left), dist.P2POp(dist.isend, value(rank, dtype), right)]
        for work in dist.batch_isend_irecv(jobs):
            work.wait()
        checks["batch_isend_irecv"] = ([passed], [every[left]])
        for name, (found, expected) in checks.items():
            if not all(same(f, e) for f, e in zip(found, expected, strict=True)):
                wrong.append(f"{name} {dtype}")
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_every_exchange_moves_every_dtype_unchanged(size: int) -> None:
    assert run_ranks(move_everything, size) == [[]] * size


def reduce_and_scatter() -> dict[str, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, size + 1)))
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rows = torch.arange(size).repeat_interleave(2).to(dtype)
        expected = torch.full((2,), size * rank).to(dtype) + total
        single = torch.empty(2, dtype=dtype)
        reduce_scatter_single(single, rows + (rank + 1))
        found[f"tensor {dtype}"] = same(single, expected.to(dtype))
        listed = torch.empty(2, dtype=dtype)
        dist.reduce_scatter(listed, list((rows + (rank + 1)).split(2)))
        found[f"list {dtype}"] = same(listed, expected.to(dtype))
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((r + 1,), float(rank + 1)) for r in range(size)])
    found["uneven"] = uneven.tolist() == [total] * (rank + 1)
    average = torch.empty(1)
    reduce_scatter_single(average, torch.full((size,), float(rank + 1)), ReduceOp.AVG)
    found["average"] = average.item() == total / size
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.uint8):
        for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.SUM):
            expected = REFERENCE[op](everyone(dtype, (size, 3)).to(torch.float64)).to(dtype)
            row = torch.empty((1, 3), dtype=dtype)
            reduce_scatter_single(row, value(rank, dtype, (size, 3)), op)
            found[f"{op} scattered {dtype}"] = same(row, expected[rank : rank + 1])
            tensor = value(rank, dtype, (size, 3))
            dist.reduce(tensor, dst=size - 1, op=op)
            wanted = expected if rank == size - 1 else value(rank, dtype, (size, 3))
            found[f"{op} to one {dtype}"] = same(tensor, wanted)
    rooted = torch.full((2,), float(rank + 1), dtype=torch.bfloat16)
    dist.reduce(rooted, dst=1)
    found["reduce"] = rooted.tolist() == [total if rank == 1 else float(rank + 1)] * 2
    return found


@pytest.mark.parametrize("size", SIZES)
def test_reduce_and_reduce_scatter_in_all_forms(size: int) -> None:
    for found in run_ranks(reduce_and_scatter, size):
        assert all(found.values()), found


def uneven_and_strided() -> dict[str, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    listed = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(listed, torch.full((rank + 1,), float(rank)))
    columns = torch.zeros(3, 2 * size)[:, ::2]
    rows = columns.t()
    all_gather_single(rows, torch.full((1, 3), float(rank)))
    received = torch.empty(size * (rank + 1))
    dist.all_to_all_single(
        received,
        torch.repeat_interleave(torch.arange(float(size)), torch.arange(1, size + 1)),
        [rank + 1] * size,
        list(range(1, size + 1)),
    )
    holes = torch.zeros(4, 4)[::2, ::2]
    if rank == 0:
        dist.send(torch.arange(8.0).reshape(2, 4)[:, 1:3], 1)
    elif rank == 1:
        dist.recv(holes, 0)
    return {
        "uneven all_gather": all((listed[r] == r).all() for r in range(size)),
        "strided all_gather": rows.tolist() == [[float(r)] * 3 for r in range(size)],
        "uneven all_to_all": received.tolist() == [float(rank)] * (size * (rank + 1)),
        "strided send and recv": rank != 1 or holes.tolist() == [[1.0, 2.0], [5.0, 6.0]],
    }


def test_uneven_parts_and_non_contiguous_tensors() -> None:
    for found in run_ranks(uneven_and_strided, 3):
        assert all(found.values()), found


def coalesced() -> dict[str, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, size + 1)))
    group = dist.group.WORLD
    ones = [torch.full((n,), float(rank + 1)) for n in (1, 2, 3)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in ones:
            dist.all_reduce(tensor)
    outputs = [torch.empty(size * n) for n in (1, 2)]
    with dist.distributed_c10d._coalescing_manager():
        for output, n in zip(outputs, (1, 2), strict=True):
            all_gather_single(output, torch.full((n,), float(rank)))
    parts = [torch.empty(1), torch.empty(2)]
    with dist.distributed_c10d._coalescing_manager():
        for part in parts:
            reduce_scatter_single(part, torch.full((size * part.numel(),), float(rank + 1)))
    table = [[torch.empty(1), torch.empty(2)] for _ in range(size)]
    group.allgather_coalesced(table, [torch.full((1,), float(rank)), torch.full((2,), float(rank))]).wait()
    return {
        "all_reduce": all((t == total).all() for t in ones),
        "all_gather": all(
            o.tolist() == sorted(list(range(size)) * n) for o, n in zip(outputs, (1, 2), strict=True)
        ),
        "reduce_scatter": all((part == total).all() for part in parts),
        "lists": all((tensor == r).all() for r in range(size) for tensor in table[r]),
    }


def test_coalesced_forms() -> None:
    for found in run_ranks(coalesced, 3):
        assert all(found.values()), found


def beyond_two_gibibytes() -> dict[str, bool]:
    """Move more bytes, and reduce more elements, than fit into MPI's classic count."""
    rank, count = dist.get_rank(), (1 << 31) + 64
    large = torch.full((count,), rank + 1, dtype=torch.uint8)
    if rank == 0:
        dist.send(large, 1)
    else:
        dist.recv(large, 0)
    found = {"send": int(large[0]) == int(large[-1]) == 1}
    dist.all_reduce(large)
    found["all_reduce"] = int(large[0]) == int(large[-1]) == 2
    half = large[: count // 2].fill_(rank + 3)
    whole = torch.empty(count, dtype=torch.uint8)
    all_gather_single(whole, half)
    found["all_gather"] = [int(whole[i]) for i in (0, count // 2 - 1, count // 2, -1)] == [3, 3, 4, 4]
    return found


@pytest.mark.full
def test_messages_of_more_than_two_gibibytes() -> None:
    for found in run_ranks(beyond_two_gibibytes, 2, deadline=200.0):
        assert all(found.values()), found
