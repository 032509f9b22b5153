"""What convolutions allocate on a processor, by rule, against the events of the allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.machine import Machine
from shardwise.oracle import Oracle
from shardwise.oracle.kernels import Direction, Roofline, Task
from shardwise.plan import Plan
from shardwise.program import Compute
from shardwise.runtime.memory import measure_peak


@pytest.mark.parametrize(
    ("nd", "batch", "channels", "size", "kernel", "dtype"),
    [
        # One small image with small filters is not brought into blocks; more, larger or grouped ones are.
        (2, 1, 256, 4, 3, torch.float32),
        (2, 1, 512, 8, 3, torch.float32),
        (2, 2, 256, 8, 3, torch.float32),
        (2, 1, 64, 8, 5, torch.float32),
        (3, 1, 16, 6, 3, torch.float32),
        (3, 1, 32, 10, 3, torch.float32),
        (3, 1, 64, 20, 3, torch.float32),
        (1, 1, 64, 32, 3, torch.float32),
        (1, 1, 64, 900, 3, torch.float32),
        (2, 1, 64, 8, 3, torch.float64),
        (3, 2, 32, 8, 3, torch.float64),
    ],
)
def test_room_of_convolutions_is_what_the_allocator_gives_them(
    nd: int, batch: int, channels: int, size: int, kernel: int, dtype: torch.dtype
) -> None:
    conv = getattr(nn, f"Conv{nd}d")(channels, channels, kernel, padding=kernel // 2, bias=False, dtype=dtype)
    x = torch.randn(batch, channels, *[size] * nd, dtype=dtype, requires_grad=True)
    machine = Machine.load("ethernet-cpu")
    stage = Oracle(sw.capture(nn.Sequential(conv), x.detach()), machine).lowered(Plan(), batch).stage(0, 0, 0)
    (op,) = (op for op in stage.ops if isinstance(op, Compute))
    made: list[torch.Tensor] = [conv(x)]
    grad = torch.ones_like(made[0])
    made[0].backward(grad)
    conv.weight.grad = x.grad = None

    def forward() -> None:
        made[0] = conv(x)

    roofline, task = Roofline(machine.device), Task.of(op, 0)
    assert measure_peak(forward).bytes == roofline.room(task, Direction.FORWARD)
    assert measure_peak(lambda: made[0].backward(grad)).bytes == roofline.room(task, Direction.BACKWARD_INPUT)
