"""Wake a sleeping rank of the same node when a message for it was sent.

With more ranks than cores a waiting rank must sleep, or it holds the core its peer needs. Timers wake it
late (50-150 us, whatever was asked for) and `sched_yield` hardly gives way on current kernels; a datagram
on a local socket wakes it as fast as the kernel can switch to it. Names are in the abstract namespace: they
vanish with the process that holds them.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterable


class Bell:
    """Hold this rank's own bell and ring those of others."""

    def __init__(self, job: str, rank: int) -> None:
        self._job = job
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._name(rank))
        self._own = [self._socket.fileno()]
        self._rank = rank
        self._addresses: dict[int, str | None] = {rank: None}

    def _name(self, rank: int) -> str:
        return f"\0shardwise/{self._job}/{rank}"

    def ring(self, ranks: Iterable[int]) -> None:
        """Wake the given ranks, if they are on this node and asleep."""
        for rank in ranks:
            if rank not in self._addresses:
                self._addresses[rank] = self._name(rank)
            address = self._addresses[rank]
            if address is None:
                continue
            try:
                self._socket.sendto(b"!", address)
            except BlockingIOError:
                # Its queue is full of rings: it will wake.
                continue
            except ConnectionRefusedError:
                # Nobody of that name here: the rank lives on another node, or has ended.
                self._addresses[rank] = None

    def sleep(self, seconds: float) -> None:
        """Sleep until rung, at most for the given time."""
        # Not poll or epoll: those count in milliseconds.
        if select.select(self._own, (), (), seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._socket.recv(1)

    def close(self) -> None:
        """Take the bell down."""
        self._socket.close()
