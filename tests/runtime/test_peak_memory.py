"""The peak of a step is what its own tensors held."""

from __future__ import annotations

import gc

import torch

from shardwise.runtime.memory import measure_peak


class _Circle:
    """Keeps a tensor until the garbage is collected."""

    def __init__(self) -> None:
        self.tensor, self.itself = torch.zeros(1 << 20), self


def test_what_was_garbage_before_does_not_hide_what_is_taken() -> None:
    gc.disable()
    try:
        _Circle()

        def work() -> None:
            gc.collect()
            torch.zeros(1 << 18)

        found = measure_peak(work)
    finally:
        gc.enable()
    assert found.bytes == 4 << 18
    assert found.left_bytes == 0
