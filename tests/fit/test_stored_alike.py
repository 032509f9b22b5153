"""Who shares memory keeps it, and ranks that store weights differently agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from ranks import run_ranks
from shardwise.runtime.order import memory_code
from shardwise.runtime.store import Store
from shardwise.training.memory_order import movable


def test_tensors_that_share_memory_are_not_movable() -> None:
    one, two, view = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4)), torch.zeros(8)
    tied, part = nn.Parameter(one.data), nn.Parameter(view[:4])
    state = {"one": one, "two": two, "tied": tied, "part": part}
    store = Store(torch.device("cpu"))
    for name, tensor in state.items():
        store.add(name, tensor, sw.Box.whole(tensor.shape))
    assert set(movable(store, state)) == {"two"}


def train(turned_on: int) -> tuple[float, list[float], int]:
    """Train one step with weights that one rank stores in another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 2)).double()
    if torch.distributed.get_rank() == turned_on:
        model.to(memory_format=torch.channels_last)
    x, y = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    trainer = sw.Trainer(model, (x, y), "data=2", loss=F.cross_entropy)
    loss = trainer.step(x, y)
    gradient = trainer.gradients()["0.weight"]
    return loss, gradient.flatten().tolist(), memory_code(model[0].weight)


def test_ranks_that_store_weights_differently_sum_the_same_elements() -> None:
    same, mixed = run_ranks(train, 2, "mpi4py", (-1,)), run_ranks(train, 2, "mpi4py", (1,))
    assert same[0] == same[1]
    assert mixed[0][2] == mixed[1][2]
    assert mixed[0][0] == same[0][0]
    for found in mixed:
        assert torch.allclose(torch.tensor(found[1]), torch.tensor(same[0][1]), rtol=1e-12, atol=1e-15)
