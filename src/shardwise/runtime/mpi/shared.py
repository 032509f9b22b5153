"""Memory that all ranks of a group on one node can see."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.runtime.mpi.library import load
from shardwise.runtime.poller import Poller

_NAME_BYTES, _MARK_BYTES = 192, 16


def share_memory(
    comm: Any, nbytes: int, ranks: Sequence[int], me: int, poller: Poller, what: str
) -> mmap.mmap | None:
    """Return zeroed memory, the same on all ranks, or None if they share none; collective over them.

    Pages that nobody touches cost nothing.
    """
    rank, whole = comm.Get_rank(), nbytes + _MARK_BYTES
    name = bytearray(_NAME_BYTES + _MARK_BYTES)
    file = -1
    memory: mmap.mmap | None = None
    if rank == 0:
        file, memory = _make(whole)
    if memory is not None:
        # The mark tells this memory from that of a process with the same number on another host.
        mark = secrets.token_bytes(_MARK_BYTES)
        memory[-_MARK_BYTES:] = mark
        path = f"/proc/{os.getpid()}/fd/{file}".encode()
        name[:] = path.ljust(_NAME_BYTES, b"\0") + mark
    task, others = f"rank {me}: {what} of ranks {list(ranks)}", [r for r in ranks if r != me]
    mpi = load()
    poller.wait(comm.Ibcast([name, len(name), mpi.BYTE], 0), None, task, others)
    if rank:
        memory = open_memory(
            bytes(name[:_NAME_BYTES]).rstrip(b"\0").decode(), whole, bytes(name[_NAME_BYTES:])
        )
    found = torch.tensor([memory is not None], dtype=torch.int32)
    poller.wait(comm.Iallreduce(mpi.IN_PLACE, [found.numpy(), 1, mpi.INT], mpi.MIN), None, task, others)
    if file >= 0:
        os.close(file)
    return memory if int(found) else None


def _make(nbytes: int) -> tuple[int, mmap.mmap | None]:
    """Return new memory and its file, or none where the system has none to give."""
    try:
        file = os.memfd_create("shardwise", os.MFD_CLOEXEC)
    except OSError:
        return -1, None
    try:
        os.ftruncate(file, nbytes)
        return file, mmap.mmap(file, nbytes)
    except (OSError, ValueError):
        os.close(file)
        return -1, None


def open_memory(path: str, nbytes: int, mark: bytes) -> mmap.mmap | None:
    """Return the memory that another process made, if it can be seen from here."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(file, nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return memory if memory[-_MARK_BYTES:] == mark else None
