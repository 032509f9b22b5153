"""Computing while messages travel changes nothing on real ranks: what accelerators do unasked."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ranks import run_ranks
from shardwise.runtime import regrid
from shardwise.runtime.interior import Interior
from shardwise.runtime.overlap import overlap_of
from shardwise.runtime.weights_later import Note
from shardwise.training import trainer as training
from transparency.harness import Case, compared

CASES = (
    Case("resnet18", (4, 3, 64, 48), "spatial=2x1", "ce"),
    Case("unet", (2, 3, 36, 52), "spatial=2x2 halo=fused", "ce"),
    Case("deep chain with norms", (2, 3, 21, 18), "spatial=2x1 tail=batch"),
    Case("resnet18", (4, 3, 65, 49), "data=2 stages=2x1|1 schedule=1f1b micro_batches=2", "ce"),
)


def overlapped(case: Case, name: str) -> tuple[dict[str, float], list[str]]:
    """Return what differs from one device, and in which order halos left and other work was done."""
    order: list[str] = []
    start, note, interior = regrid.Exchange.start, Note.__call__, Interior.finish

    def leave(self: regrid.Exchange, tensor: torch.Tensor | None) -> None:
        order.append("halo back" if self.what.endswith("(backward)") else "halo")
        start(self, tensor)

    def weights(self: Note) -> None:
        order.append("weights")
        note(self)

    def ahead(self: Interior, *arguments: object) -> object:
        order.append("interior")
        return interior(self, *arguments)

    with (
        mock.patch.object(training, "overlap_of", lambda _, device: overlap_of(name, device)),
        mock.patch.object(regrid.Exchange, "start", leave),
        mock.patch.object(Note, "__call__", weights),
        mock.patch.object(Interior, "finish", ahead),
    ):
        found = compared(case)[0]
    return {} if found is None else found.bad, order


@pytest.mark.parametrize(("name", "transport"), [("both", "mpi4py"), ("backward", "gloo"), ("both", "gloo")])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_computed_while_messages_travel_is_exact(case: Case, name: str, transport: str) -> None:
    results = run_ranks(overlapped, case.ranks, transport, (case, name))
    assert results[0][0] == {}
    orders = [order for _, order in results]
    assert any("weights" in order for order in orders)
    assert any("interior" in order for order in orders) == (name == "both")


def test_gradients_of_halos_leave_before_the_weights_of_the_same_layer() -> None:
    case = Case("conv3 twice", (2, 3, 21, 18), "spatial=2x1", steps=1)
    for bad, order in run_ranks(overlapped, case.ranks, "mpi4py", (case, "backward")):
        assert bad == {}
        back = [what for what in order if what in ("halo back", "weights")]
        # Every convolution reads a halo: it sends its gradients off, then makes those of its weights.
        assert back == ["halo back", "weights"] * 3


def test_without_overlap_nothing_is_put_off() -> None:
    case = Case("conv3 twice", (2, 3, 21, 18), "spatial=2x1", steps=1)
    for bad, order in run_ranks(overlapped, case.ranks, "mpi4py", (case, "off")):
        assert bad == {}
        assert set(order) == {"halo", "halo back"}
