"""Buckets and pieces of gradient sums on a wire that completes only when asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.runtime import reducer
from shardwise.runtime.reducer import Reducer


class Sum:
    """Double a tensor when it is waited for, or after some tests."""

    def __init__(self, wire: SlowWire, tensor: Tensor) -> None:
        self.wire, self.tensor, self.tests, self.over = wire, tensor, 0, False

    def wait(self) -> None:
        if not self.over:
            self.over = True
            self.tensor.mul_(2)
            self.wire.flying -= self.tensor.nbytes

    def done(self) -> bool:
        self.tests += 1
        if self.tests > 3:
            self.wait()
        return self.over


class SlowWire:
    """Remember what was started, and how many bytes were under way at most."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.flying = self.most = 0

    def start_all_reduce(self, tensor: Tensor, what: str) -> Sum:
        self.started.append((what.split()[2], tensor.nbytes))
        self.flying += tensor.nbytes
        self.most = max(self.most, self.flying)
        return Sum(self, tensor)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "SINGLE_BYTES", 64)
    monkeypatch.setattr(reducer, "PIECE_BYTES", 128)


def parameters() -> dict[str, nn.Parameter]:
    sizes = {"large": 200, "one": 3, "two": 4, "middle": 16, "unused": 2}
    return {name: nn.Parameter(torch.zeros(n)) for name, n in sizes.items()}


def test_sums_keep_their_order_and_few_bytes_are_under_way(small: None) -> None:
    wire, held = SlowWire(), parameters()
    summed = Reducer(held, dict.fromkeys(held, wire), [tuple(held)], bucket_bytes=1000)
    for step in range(2):
        wire.started.clear()
        for name, parameter in held.items():
            parameter.grad = None if name == "unused" else torch.full_like(parameter, step + 1.0)
        for name in ("middle", "large", "large", "two", "one", "unused"):
            summed.ready(name)
        summed.finish()
        names = [name for name, _ in wire.started]
        assert names == ["large"] * 7 + ["middle", "one"]
        assert max(nbytes for _, nbytes in wire.started) == 128
        assert wire.most <= 256
        assert wire.flying == 0
        for name, parameter in held.items():
            assert parameter.grad is not None
            assert parameter.grad.unique().tolist() == [0.0 if name == "unused" else 2 * (step + 1.0)]


def test_with_two_wires_everything_starts_before_anything_is_waited_for(small: None) -> None:
    one, two, held = SlowWire(), SlowWire(), parameters()
    wires = {name: one if name == "large" else two for name in held}
    summed = Reducer(held, wires, [tuple(held)])
    for parameter in held.values():
        parameter.grad = torch.ones_like(parameter)
    summed.finish()
    assert one.most == held["large"].nbytes
    assert two.most == sum(p.nbytes for name, p in held.items() if name != "large")


@pytest.mark.parametrize("kept", [True, False])
def test_a_permuted_parameter_is_summed_where_its_gradient_is(small: None, kept: bool) -> None:
    """Keras stores kernels in another order than torch reads them; all ranks store them alike."""
    wire = SlowWire()
    weight = nn.Parameter(torch.zeros(3, 3, 4, 5).permute(3, 2, 0, 1))
    values = torch.arange(180.0).view(5, 4, 3, 3)
    grad = torch.empty_like(weight).copy_(values) if kept else values.clone()
    weight.grad = grad
    summed = Reducer({"w": weight}, {"w": wire}, [("w",)])
    summed.ready("w")
    summed.finish()
    assert torch.equal(weight.grad, 2 * values)
    assert weight.grad.stride() == weight.stride()
    assert (weight.grad is grad) == kept
    assert sum(nbytes for _, nbytes in wire.started) == weight.nbytes
