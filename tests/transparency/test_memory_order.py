"""Images with channels last give the numbers of one device, whose images have channels first."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ranks import run_ranks
from shardwise.runtime.order import LAST
from shardwise.training import trainer as training
from transparency.harness import Case, compared

CASES = (
    Case("resnet18", (4, 3, 64, 48), "spatial=2x1", "ce"),
    Case("resnet18", (4, 3, 65, 49), "spatial=2x2 tail=batch", "ce"),
    # Instance norms of a single sample, whose gradients torch gets wrong with channels last.
    Case("random", (3, 3, 29, 23), "batch=2", settings=(("seed", 16), ("size", (29, 23)))),
    # Bottlenecks: kernels of one pixel, with and without steps, and norms that rectify.
    Case("resnet50", (4, 3, 67, 51), "spatial=2x1", "ce"),
    Case("resnet50", (4, 3, 67, 51), "data=2 spatial=1x2", "ce"),
    Case("unet", (2, 3, 36, 52), "spatial=2x2 halo=fused", "ce"),
    Case("unet", (2, 3, 36, 52), "filter=2", "ce"),
    Case("resnet18", (4, 3, 65, 49), "channel=2", "ce"),
    Case("resnet18", (4, 3, 65, 49), "data=2 stages=2x1|1 schedule=1f1b micro_batches=2", "ce"),
    Case("unet", (4, 3, 36, 52), "stages=2 schedule=bidirectional micro_batches=2", "ce"),
)


def last(case: Case) -> tuple[dict[str, float], set[bool]]:
    """Return what differs from one device, and whether kernels were found in this order and in the other."""
    orders: set[bool] = set()
    settle = type(LAST).settle

    def watched(self: object, ops: object, tensors: dict[str, torch.Tensor], width: int) -> None:
        settle(LAST, ops, tensors, width)
        kernels = [t for t in tensors.values() if t.ndim == 4 and min(t.shape[1:]) > 1]
        orders.update(not kernel.is_contiguous() for kernel in kernels)

    with (
        mock.patch.object(training, "agreed_order", return_value=LAST),
        mock.patch.object(type(LAST), "settle", watched),
    ):
        found = compared(case)[0]
    return {} if found is None else found.bad, orders


@pytest.mark.parametrize(
    ("case", "transport"),
    [(case, ("mpi4py", "gloo")[i % 2]) for i, case in enumerate(CASES)],
    ids=lambda value: getattr(value, "name", value),
)
def test_channels_last_is_exact(case: Case, transport: str) -> None:
    results = run_ranks(last, case.ranks, transport, (case,))
    assert results[0][0] == {}
    assert any(True in orders for _, orders in results)
