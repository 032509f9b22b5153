"""Parts of torch that use process groups run unmodified on the mpi4py backend."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (12, 8), (12, 4)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shape)  # type: ignore[return-value]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def data_parallel(bucket_megabytes: float) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = model()
    replica = DistributedDataParallel(copy.deepcopy(whole), bucket_cap_mb=bucket_megabytes)
    inputs, targets = data()
    for _ in range(2):
        nn.functional.mse_loss(whole(inputs), targets).backward()
        mine = slice(rank * 12 // size, (rank + 1) * 12 // size)
        nn.functional.mse_loss(replica(inputs[mine]), targets[mine]).backward()
    grads = [parameter.grad for parameter in replica.parameters()]
    return largest_difference(grads, [parameter.grad for parameter in whole.parameters()])  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("bucket_megabytes", [25, 0.001])
def test_distributed_data_parallel_gives_the_gradients_of_one_process(bucket_megabytes: float) -> None:
    for difference in run_ranks(data_parallel, 3, args=(bucket_megabytes,)):
        assert difference < 1e-12


def save_and_load(folder: str) -> dict[str, bool]:
    rank = dist.get_rank()
    state = {"shared": torch.arange(6.0), f"own{rank}": torch.full((3,), float(rank))}
    checkpoint.save(state, checkpoint_id=folder)
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(empty, checkpoint_id=folder)
    return {name: torch.equal(empty[name], state[name]) for name in state}


def test_distributed_checkpoint_saves_and_loads() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, found in enumerate(run_ranks(save_and_load, 2, args=(folder,))):
            assert found == {"shared": True, f"own{rank}": True}


def mesh() -> dict[str, Any]:
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tile"))
    sums = {}
    for name in ("data", "tile"):
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=made.get_group(name))
        sums[name] = tensor.item()
    gathered = dist.nn.functional.all_gather(torch.tensor([float(dist.get_rank())]), made.get_group("tile"))
    functional = torch.distributed._functional_collectives.all_gather_tensor(
        torch.tensor([float(dist.get_rank())]), 0, made.get_group("data")
    )
    return {**sums, "tiles": [t.item() for t in gathered], "replicas": functional.tolist()}


def test_device_mesh_makes_groups_along_its_axes() -> None:
    found = run_ranks(mesh, 4)
    assert [entry["data"] for entry in found] == [2.0, 4.0, 2.0, 4.0]
    assert [entry["tile"] for entry in found] == [1.0, 1.0, 5.0, 5.0]
    assert [entry["tiles"] for entry in found] == [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2
    assert [entry["replicas"] for entry in found] == [[0.0, 2.0], [1.0, 3.0]] * 2


def pipeline(schedule: str) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = model()
    split = copy.deepcopy(whole)
    part = split[:2] if rank == 0 else split[2:]
    inputs, targets = data()
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    runner = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        runner.step(inputs)
    else:
        runner.step(target=targets, losses=[])
    nn.functional.mse_loss(whole(inputs), targets).backward()
    expected = whole[:2] if rank == 0 else whole[2:]
    grads = [parameter.grad for parameter in part.parameters()]
    return largest_difference(grads, [parameter.grad for parameter in expected.parameters()])  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_torch_pipelining_gives_the_gradients_of_one_process(schedule: str) -> None:
    for difference in run_ranks(pipeline, 2, args=(schedule,)):
        assert difference < 1e-12
