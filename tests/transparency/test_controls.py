"""The suite can fail: three well-known mistakes, made on purpose inside the ranks, are each found."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwise.program import Normalise
from shardwise.runtime import regrid, shared_norm
from shardwise.runtime.reducer import Reducer
from shardwise.runtime.wire import LoneWire
from transparency.compare import errors
from transparency.harness import Case, compared

CHAIN = Case("deep chain with norms", (2, 3, 21, 18), "spatial=2x1")
PLAIN = Case("conv3 twice", (2, 3, 21, 18), "spatial=2x1")


def sound(case: Case) -> dict[str, float]:
    found = compared(case)[0]
    return {} if found is None else found.bad


def without_a_halos_backward(case: Case) -> dict[str, float]:
    """Let the halo's gradient stay where it is: its owner adds nothing."""
    start = regrid.Exchange.start

    def emptied(self: regrid.Exchange, tensor: torch.Tensor | None) -> None:
        if self.what.endswith("(backward)") and tensor is not None:
            tensor = tensor.clone()
            for piece in self.pack:
                tensor[piece.slices] = 0.0
        start(self, tensor)

    with mock.patch.object(regrid.Exchange, "start", emptied):
        return sound(case)


def without_one_halos_backward(case: Case) -> dict[str, float]:
    """Let one halo's gradient, on one rank, stay where it is."""
    start, dropped = regrid.Exchange.start, []

    def emptied(self: regrid.Exchange, tensor: torch.Tensor | None) -> None:
        mine = dist.get_rank() == 1 and self.what.endswith("(backward)") and tensor is not None
        if mine and self.pack and not dropped:
            dropped.append(self)
        if tensor is not None and self in dropped:
            tensor = tensor.clone()
            for piece in self.pack:
                tensor[piece.slices] = 0.0
        start(self, tensor)

    with mock.patch.object(regrid.Exchange, "start", emptied):
        found = sound(case)
    assert dropped or dist.get_rank() != 1
    return found


def with_local_statistics(case: Case) -> dict[str, float]:
    """Let every tile normalise with its own sums."""
    init = shared_norm.SharedBatchNorm.__init__

    def alone(
        self: shared_norm.SharedBatchNorm, op: Normalise, rank: int, _wire: object, *others: object
    ) -> None:
        init(self, op, rank, LoneWire(), *others)
        mine = op.owned.box(rank).intersect(op.wants[0].box(rank))
        self.count = max(1, mine.size // max(1, mine.shape[1]))

    with mock.patch.object(shared_norm.SharedBatchNorm, "__init__", alone):
        return sound(case)


def with_averaged_tiles(case: Case) -> dict[str, float]:
    """Divide the summed gradients by the number of tiles, as for replicas."""
    finish = Reducer.finish

    def averaged(self: Reducer) -> None:
        finish(self)
        for bucket in (bucket for line in self.lines.values() for bucket in line.buckets):
            for parameter in bucket.parameters:
                parameter.grad.div_(case.ranks)

    with mock.patch.object(Reducer, "finish", averaged):
        return sound(case)


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
def test_nothing_is_found_where_nothing_is_wrong(transport: str) -> None:
    for case in (CHAIN, PLAIN):
        assert run_ranks(sound, case.ranks, transport, (case,))[0] == {}


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
@pytest.mark.parametrize("halo", ["layer", "fused"])
def test_one_dropped_halo_gradient_of_one_rank_is_found(halo: str, transport: str) -> None:
    case = replace(CHAIN, plan=f"{CHAIN.plan} halo={halo}")
    found = run_ranks(without_one_halos_backward, case.ranks, transport, (case,))[0]
    assert found["gradient of input 0"] > 1e-3


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
def test_a_dropped_halo_gradient_is_found(transport: str) -> None:
    found = run_ranks(without_a_halos_backward, PLAIN.ranks, transport, (PLAIN,))[0]
    assert found["gradient of input 0"] > 1e-3
    assert found["gradient of 0.weight"] > 1e-3
    # The last layer sees no halo's gradient: in the first step it would still be right.
    assert "loss" in found


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
def test_local_batch_norm_sums_are_found(transport: str) -> None:
    found = run_ranks(with_local_statistics, CHAIN.ranks, transport, (CHAIN,))[0]
    assert found["loss"] > 1e-6
    assert found["state 2.running_mean"] > 1e-6
    assert found["gradient of 1.weight"] > 1e-3


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
def test_averaged_tile_gradients_are_found(transport: str) -> None:
    found = run_ranks(with_averaged_tiles, PLAIN.ranks, transport, (PLAIN,))[0]
    assert found["gradient of 0.weight"] > 0.1
    assert found["gradient of 3.weight"] > 0.1


def test_results_that_are_no_numbers_are_found_even_if_one_device_has_them_too() -> None:
    good, bad = ({"a": torch.full((2,), value)} for value in (1.0, float("nan")))
    infinite = {"a": torch.full((2,), float("inf"))}
    for found, expected in ((bad, good), (good, bad), (bad, bad), (infinite, infinite)):
        assert errors(found, expected, 1.0) == {"a": float("inf")}
