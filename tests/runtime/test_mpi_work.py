"""Groups, handles, deadlines and direct access of the mpi4py backend."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwise.runtime import StalledError, mpi, progress
from shardwise.runtime.mpi import buffers


def sub_groups() -> dict[str, Any]:
    rank = dist.get_rank()
    low, odd = dist.new_group([0, 1]), dist.new_group([3, 1])
    tensor = torch.tensor([float(rank)])
    if rank in (0, 1):
        dist.all_reduce(tensor, group=low)
    found: dict[str, Any] = {"low": tensor.item()}
    if rank in (1, 3):
        part = torch.tensor([float(rank)])
        dist.broadcast(part, src=3, group=odd)
        found["odd"] = (part.item(), dist.get_rank(odd), mpi.group_comm(odd).Get_rank())
        if rank == 3:
            dist.send(torch.tensor([7.0]), dst=1, group=odd)
        else:
            dist.recv(part, src=3, group=odd)
            found["received"] = part.item()
    for group in (low, odd):
        dist.destroy_process_group(group)
    return found


def test_sub_groups_number_their_own_ranks_and_talk_among_themselves() -> None:
    found = run_ranks(sub_groups, 4)
    assert [entry["low"] for entry in found] == [1.0, 1.0, 2.0, 3.0]
    # torch sorts the members of a group, so rank 1 comes first.
    assert found[1]["odd"] == (3.0, 0, 0)
    assert found[3]["odd"] == (3.0, 1, 1)
    assert found[1]["received"] == 7.0


def object_collectives() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    told: list[Any] = [("plan", 7), None] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list(["hello"], dst=1)
    heard: list[Any] = [None]
    if rank == 1:
        dist.recv_object_list(heard, src=0)
    collected: list[Any] = [None] * size
    dist.gather_object(("from", rank), collected if rank == 2 else None, dst=2)
    return {"gathered": gathered, "told": told, "mine": mine, "heard": heard, "collected": collected}


def test_object_collectives_carry_pickled_objects() -> None:
    for rank, found in enumerate(run_ranks(object_collectives, 3)):
        assert found["gathered"] == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert found["told"] == [("plan", 7), None]
        assert found["mine"] == [f"for {rank}"]
        assert found["heard"] == (["hello"] if rank == 1 else [None])
        assert found["collected"] == ([("from", r) for r in range(3)] if rank == 2 else [None] * 3)


def asynchronous() -> dict[str, Any]:
    rank = dist.get_rank()
    tensor = torch.full((1000,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    completed = False
    end = time.monotonic() + 20
    while not completed and time.monotonic() < end:
        completed = work.is_completed()
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    received = torch.empty(1)
    source = None
    if rank == 0:
        source = dist.recv(received)
    elif rank == 1:
        dist.send(torch.ones(1), 0)
    dist.barrier()
    return {
        "completed": completed,
        "sum": tensor.unique().tolist(),
        "future": future.wait()[0].tolist(),
        "source": source,
    }


def test_work_can_be_asked_waited_for_and_turned_into_a_future() -> None:
    for rank, found in enumerate(run_ranks(asynchronous, 2)):
        assert found == {
            "completed": True,
            "sum": [3.0],
            "future": [2.0] * 3,
            "source": 1 if rank == 0 else None,
        }


def futures() -> dict[str, Any]:
    """Rank 1 comes late; rank 0 meanwhile holds futures and never calls MPI itself."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    if rank == 1:
        time.sleep(0.3)
    sums = [torch.full((size,), float(rank + 1)) for size in (3, 1 << 18)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
    made = [work.get_future() for work in works]
    found["early"] = [future.done() for future in made]
    found["same"] = works[0].get_future() is made[0]
    squared = made[0].then(lambda future: future.value()[0] ** 2)
    found["then"] = squared.wait().tolist()
    found["sums"] = [future.wait()[0].unique().tolist() for future in made]
    found["wait"] = all(work.wait() and work.is_completed() for work in works)
    late = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    if rank == 0:
        try:
            dist.all_reduce(torch.empty(4), group=late, async_op=True).get_future().wait()
        except StalledError as error:
            found["error"] = str(error)
    return found


def test_futures_are_completed_while_their_owner_does_something_else() -> None:
    found = run_ranks(futures, 2)
    assert found[0]["early"] == [False, False]
    for entry in found:
        assert entry["same"]
        assert entry["wait"]
        assert entry["then"] == [9.0] * 3
        assert entry["sums"] == [[3.0], [3.0]]
    for word in ("rank 0", "all_reduce", "[4] float32", "0.2 s"):
        assert word in found[0]["error"]


def forgotten_send() -> bool:
    rank = dist.get_rank()
    big = 1 << 20
    if rank == 0:
        # The handle and the tensor are dropped at once; the message must arrive all the same.
        dist.isend(torch.arange(float(big)), 1)
        gc.collect()
        rubbish = [torch.full((big,), -1.0) for _ in range(4)]
        while mpi.poller().adopted:
            progress()
        return len(rubbish) == 4
    received = torch.empty(big)
    dist.recv(received, 0)
    return bool((received == torch.arange(float(big))).all())


def test_a_send_whose_handle_was_dropped_still_arrives() -> None:
    assert run_ranks(forgotten_send, 2) == [True, True]


def forgotten_receives() -> dict[str, Any]:
    """Drop the handles of operations that have something left to do when their messages are there."""
    rank = dist.get_rank()
    average = torch.full((4,), float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG, async_op=True)
    holes = torch.zeros(4, 4)[::2, ::2]
    if rank == 0:
        dist.irecv(holes, 1)
    else:
        dist.send(torch.ones(2, 2), 0)
    gc.collect()
    end = time.monotonic() + 20
    while mpi.poller().adopted and time.monotonic() < end:
        progress()
    return {"average": average.tolist(), "holes": float(holes.sum())}


def test_an_operation_whose_handle_was_dropped_still_gives_its_result() -> None:
    found = run_ranks(forgotten_receives, 2)
    assert [entry["average"] for entry in found] == [[0.5] * 4] * 2
    assert found[0]["holes"] == 4.0


def deadlines() -> dict[str, str]:
    rank = dist.get_rank()
    found = {}
    if rank == 0:
        try:
            dist.irecv(torch.empty(2, 3, dtype=torch.float64), 1, tag=5).wait(timedelta(seconds=0.3))
        except StalledError as error:
            found["wait"] = str(error)
        dist.recv(torch.empty(1), 1)
    else:
        dist.send(torch.ones(2, 3, dtype=torch.float64), 0, tag=5)
        dist.send(torch.ones(1), 0)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    if rank == 0:
        try:
            dist.all_reduce(torch.empty(4, dtype=torch.int32), group=group)
        except StalledError as error:
            found["group"] = str(error)
    return found


def late_sender() -> dict[str, str]:
    if dist.get_rank() == 1:
        time.sleep(0.8)
    return deadlines()


def test_a_deadline_raises_an_error_that_names_rank_peer_operation_and_tensor() -> None:
    found, _ = run_ranks(late_sender, 2)
    for word in ("rank 0", "recv", "peer rank 1", "[2, 3] float64", "0.3 s"):
        assert word in found["wait"]
    for word in ("rank 0", "all_reduce", "[4] int32", "0.3 s"):
        assert word in found["group"]


def collectives_that_rank_1_joins_late() -> list[str]:
    """Call collectives with a timeout of their own, in each of the ways in which torch gives one."""
    group, short = dist.group.WORLD, timedelta(seconds=0.1)
    options = dist.AllreduceOptions()
    options.timeout = short
    add = dist.ReduceOp.SUM
    calls: list[Callable[[timedelta | None], Any]] = [
        lambda limit: group.allreduce([torch.ones(1)], options if limit else dist.AllreduceOptions()),
        lambda limit: group.allreduce(torch.ones(1), add, limit),
        lambda limit: group.reduce(torch.ones(1), 0, add, limit),
        lambda limit: group.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2, add, limit),
        lambda limit: group.broadcast(torch.ones(1), 1, limit),
        lambda limit: group.allgather([torch.ones(1), torch.ones(1)], torch.ones(1), timeout=limit),
        lambda limit: group.gather([torch.ones(1), torch.ones(1)], torch.ones(1), 0, limit),
        lambda limit: group.alltoall(list(torch.ones(2, 1)), list(torch.ones(2, 1)), timeout=limit),
        lambda limit: group.barrier(timeout=limit),
    ]
    late = dist.get_rank() == 1
    if late:
        time.sleep(0.1 * len(calls) + 0.5)
    works, errors = [], []
    for call in calls:
        works.append(call(None if late else short))
        try:
            works[-1].wait()
        except StalledError as error:
            errors.append(str(error))
    # What was given up is complete once the other rank has come.
    for work in works:
        work.wait(timedelta(seconds=20))
    return errors


def test_collectives_honour_a_timeout_of_their_own() -> None:
    found, none = run_ranks(collectives_that_rank_1_joins_late, 2)
    assert none == []
    names = ["all_reduce", "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather"]
    assert len(found) == len(names) + 2
    for name, text in zip([*names, "all_to_all", "barrier"], found, strict=True):
        assert text.startswith(f"rank 0: {name}")
        assert "not complete after 0.1 s" in text


def straight_through() -> list[float]:
    """Post messages on the group's own communicator, as the runtime does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = mpi.group_comm()
    received = torch.empty(2)
    sent = torch.full((2,), float(rank))
    requests = [
        comm.Irecv(buffers.memory(received), (rank - 1) % size),
        comm.Isend(buffers.memory(sent), (rank + 1) % size),
    ]
    mpi.poller().wait_all(requests, 20.0, lambda: f"rank {rank}: ring")
    return received.tolist()


def test_messages_posted_directly_are_waited_for_by_the_poller() -> None:
    assert run_ranks(straight_through, 3) == [[2.0] * 2, [0.0] * 2, [1.0] * 2]


def staged_receives() -> dict[str, bool]:
    """Pretend MPI may not write these tensors, as for device tensors without a device-aware MPI."""
    rank, size = dist.get_rank(), dist.get_world_size()
    original = buffers.direct
    buffers.direct = lambda tensor: False
    try:
        _, copy_back = buffers.writable(torch.empty(2))
        told = torch.full((2,), float(rank))
        dist.broadcast(told, 1)
        passed = torch.empty(2)
        work = dist.irecv(passed, (rank - 1) % size)
        dist.send(torch.full((2,), float(rank)), (rank + 1) % size)
        work.wait()
    finally:
        buffers.direct = original
    return {
        "is staged": copy_back is not None,
        "broadcast": told.tolist() == [1.0] * 2,
        "recv": passed.tolist() == [float((rank - 1) % size)] * 2,
    }


def test_receives_staged_in_host_memory_are_copied_back() -> None:
    for found in run_ranks(staged_receives, 2):
        assert all(found.values()), found


def shape_errors() -> list[str]:
    messages = []
    group: Any = dist.group.WORLD
    for call in (
        lambda: group.all_gather_single(torch.empty(3), torch.empty(2)),
        lambda: group.reduce_scatter_single(torch.empty(2), torch.empty(3)),
        lambda: group.all_to_all_single(torch.empty(3), torch.empty(3), [], []),
        lambda: group.send([torch.empty(1), torch.empty(1)], 0),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_wrong_shapes_are_refused_before_anything_is_sent() -> None:
    for messages in run_ranks(shape_errors, 2):
        assert len(messages) == 4
        assert "needs 4" in messages[0]


def test_a_group_of_another_backend_has_no_communicator() -> None:
    with pytest.raises(TypeError, match="mpi4py"):
        mpi.group_comm(object())  # type: ignore[arg-type]


def guarded() -> list[str]:
    group: Any = dist.group.WORLD
    said = []
    group.monitored_barrier(timedelta(seconds=20))
    for everyone in (False, True):
        if dist.get_rank() == 0:
            try:
                group.monitored_barrier(timedelta(seconds=0.1), everyone)
            except StalledError as error:
                said.append(str(error))
    dist.barrier()
    group.monitored_barrier(timedelta(seconds=20))
    return said


def test_a_monitored_barrier_names_who_did_not_come() -> None:
    first, *_ = run_ranks(guarded, 3)
    assert len(first) == 2
    assert "rank 0: monitored_barrier" in first[0]
    assert "rank 1 did not come" in first[0]
    assert "rank 1, 2 did not come" in first[1]
