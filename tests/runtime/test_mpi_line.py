"""Messages of the runtime itself over MPI: given up, staged, and behind the work of a device."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from ranks import run_ranks
from shardwise.runtime import channels, mpi, progress
from shardwise.runtime import wire as wire_module
from shardwise.runtime.mpi import buffers, line
from shardwise.runtime.wire import Parcel, wire_of


def abandoned_line() -> list[float]:
    """Drop a line whose messages are under way: they arrive in memory that is still there."""
    rank, big = dist.get_rank(), 1 << 18
    wire = wire_of(dist.group.WORLD, range(2))
    received, sent = torch.zeros(big), torch.full((big,), float(rank))
    made = wire.line([Parcel(1 - rank, received)], [Parcel(1 - rank, sent)], 77, "abandoned")
    said = made.describe()
    made.start()
    pending = wire.receive(Parcel(1 - rank, torch.zeros(big)), 78, "abandoned too")
    wire.send(Parcel(1 - rank, torch.ones(big)), 78, "abandoned as well")
    del made, sent, pending
    end = time.monotonic() + 20
    while mpi.poller().adopted and time.monotonic() < end:
        progress()
    assert said == f"rank {rank}: abandoned, peers [{1 - rank}], tensor [{big}] float32, [{big}] float32"
    return received.unique().tolist()


def test_messages_of_the_runtime_that_were_given_up_end_in_peace() -> None:
    assert run_ranks(abandoned_line, 2) == [[1.0], [0.0]]


def staged_lines() -> dict[str, bool]:
    """The same for the messages of the runtime itself, and for a sum in 16 bits."""
    rank = dist.get_rank()
    original, moved = line._stage, []
    line._stage = lambda buffer: moved.append(buffer) or torch.empty_like(buffer)
    try:
        wire = wire_of(dist.group.WORLD, range(2))
        received, sent = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
        made = wire.line([Parcel(1 - rank, received)], [Parcel(1 - rank, sent)], 79, "staged")
        arrived = []
        for step in range(2):
            sent.fill_(rank + 10 * step)
            made.start()
            made.finish()
            arrived.append(received.tolist())
        alone = torch.zeros(2)
        pending = wire.receive(Parcel(1 - rank, alone), 80, "staged")
        wire.send(Parcel(1 - rank, torch.full((2,), float(rank))), 80, "staged").wait()
        pending.wait()
    finally:
        line._stage = original
    total = torch.full((3,), rank + 0.5, dtype=torch.bfloat16)[::2]
    wire.all_reduce(total)
    other = 1 - rank
    return {
        "is staged": len(moved) == 3,
        "line": arrived == [[other] * 3, [other + 10] * 3],
        "single": alone.tolist() == [other] * 2,
        "sum": total.tolist() == [2.0] * 2,
    }


def test_messages_of_the_runtime_staged_in_host_memory_arrive() -> None:
    for found in run_ranks(staged_lines, 2):
        assert all(found.values()), found


def too_many_messages() -> str:
    """Bind the stages of a pipeline to a transport with few tags."""
    made = channels.highest_tag
    channels.highest_tag = lambda: 4095
    x, y = torch.randn(4, 6), torch.randn(4, 2)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    try:
        for micro_batches in (4, 8):
            plan = f"stages=2 micro_batches={micro_batches}"
            sample = (x.repeat(2, 1), y.repeat(2, 1))
            sw.Trainer(model, sample, plan, loss=F.mse_loss, optimizer=sgd).step(*sample)
    except ValueError as error:
        return f"{micro_batches}: {error}"
    finally:
        channels.highest_tag = made
    return "bound"


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)  # type: ignore[attr-defined]


def test_more_messages_than_mpi_has_tags_for_are_refused() -> None:
    for found in run_ranks(too_many_messages, 2):
        assert found.startswith("8: messages between stages: their tags go up to 8191, ")
        assert "(MPI_TAG_UB) to 4095; use fewer micro_batches" in found
    (limit, _) = run_ranks(wire_module.highest_tag, 2)
    assert limit >= 32767


def test_the_stream_of_a_device_is_waited_for_before_mpi_touches_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: asked.append(device) or stream)
    buffers.settle(torch.empty(1))
    assert not asked
    buffers.settle(torch.empty(1, device="meta"))
    assert asked == [torch.device("meta")]
