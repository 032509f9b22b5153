"""Device memory and MPI: whether the library takes it is found out, and then it is handed over as it is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from shardwise.runtime.mpi import buffers, library, line

DEVICE = torch.device("meta")  # stands for one whose memory the host cannot read


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SHARDWISE_MPI_CUDA", "MV2_USE_CUDA", "MVP_USE_CUDA"):
        monkeypatch.delenv(name, raising=False)
    library.cuda_aware.cache_clear()
    yield
    library.cuda_aware.cache_clear()


def fake(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(__file__="MPI.so"))
    monkeypatch.setattr(
        library, "ctypes", SimpleNamespace(CDLL={"MPI.so": SimpleNamespace(**functions)}.__getitem__)
    )


@pytest.mark.parametrize("answer", [0, 1])
def test_the_library_is_asked(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    fake(monkeypatch, MPIX_Query_cuda_support=lambda: answer)
    assert library.cuda_aware() is bool(answer)


def test_a_library_that_cannot_be_asked_takes_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    assert library.cuda_aware() is False


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SHARDWISE_MPI_CUDA", "0", False),
        ("SHARDWISE_MPI_CUDA", "1", True),
        ("MV2_USE_CUDA", "1", True),
        ("MVP_USE_CUDA", "1", True),
    ],
)
def test_what_the_environment_says_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: bool
) -> None:
    fake(monkeypatch, MPIX_Query_cuda_support=lambda: not expected)
    monkeypatch.setenv(name, value)
    assert library.cuda_aware() is expected


def test_device_memory_goes_as_it_is_to_a_library_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, MPIX_Query_cuda_support=lambda: 1)
    settled: list[torch.Tensor] = []
    monkeypatch.setattr(buffers, "settle", settled.append)
    tensor = torch.empty(4, 6, device=DEVICE)
    assert buffers.direct(tensor)
    assert buffers.readable(tensor) is tensor
    assert buffers.writable(tensor) == (tensor, None)
    assert line._stage(tensor) is tensor
    assert len(settled) == 2
    columns = tensor[:, ::2]
    assert buffers.readable(columns).is_contiguous()
    staged, finish = buffers.writable(columns)
    assert (staged.device, staged.shape, finish is None) == (DEVICE, columns.shape, False)
    flat, _ = buffers.flat_writable([tensor, columns])
    assert (flat.device, flat.numel()) == (DEVICE, 36)
    assert len(settled) == 5


def test_device_memory_is_staged_for_a_library_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, MPIX_Query_cuda_support=lambda: 0)
    monkeypatch.setattr(buffers, "settle", lambda _: None)
    tensor = torch.empty(4, 6, device=DEVICE)
    assert not buffers.direct(tensor)
    staged, finish = buffers.writable(tensor)
    assert staged.is_cpu
    assert finish is not None
    assert buffers.flat_writable([tensor])[0].is_cpu
