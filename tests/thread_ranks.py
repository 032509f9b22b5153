"""Ranks that are threads of this process: the runtime's own code on a wire of queues and barriers.

Starting processes costs more than most single layers do. Here a stage runs with one thread per rank, so that
hundreds of layers and splits fit into seconds; what real transports do is tested with real processes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.wire import Line, Parcel, Pending

_SECONDS = 20.0


class Exchange:
    """What all threads of a group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self.boxes: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        self.lock = threading.Lock()
        self.sums: list[Tensor | None] = [None] * size

    def box(self, source: int, target: int, tag: int) -> queue.Queue[Tensor]:
        with self.lock:
            return self.boxes.setdefault((source, target, tag), queue.Queue())


class _Done:
    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


class _Line:
    def __init__(
        self, wire: ThreadWire, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int
    ) -> None:
        self.wire, self.receives, self.sends, self.tag = wire, receives, sends, tag

    def start(self) -> None:
        for p in self.sends:
            self.wire.shared.box(self.wire.rank, p.peer, self.tag).put(p.buffer.clone())

    def finish(self) -> None:
        for p in self.receives:
            p.buffer.copy_(self.wire.shared.box(p.peer, self.wire.rank, self.tag).get(timeout=_SECONDS))


class ThreadWire:
    """The wire of one thread; `log` is what it was asked to carry, in order."""

    def __init__(self, shared: Exchange, rank: int) -> None:
        self.shared, self.rank = shared, rank
        self.log: list[str] = []

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        raise NotImplementedError("stages of one group use lines only")

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        raise NotImplementedError("stages of one group use lines only")

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        return _Line(self, receives, sends, tag)

    def all_reduce(self, tensor: Tensor) -> None:
        self.log.append(f"all_reduce {tuple(tensor.shape)}")
        self.shared.sums[self.rank] = tensor.clone()
        self.shared.barrier.wait()
        total = torch.stack([t for t in self.shared.sums if t is not None]).sum(0)
        self.shared.barrier.wait()
        tensor.copy_(total)

    def start_all_reduce(self, tensor: Tensor, what: str, *, in_turn: bool = False) -> Pending:
        self.all_reduce(tensor)
        return _Done()


def run_threads(fn: Callable[[int, ThreadWire], Any], size: int) -> list[Any]:
    """Run `fn(rank, wire)` on as many threads and return the results; raise what any of them raised."""
    shared = Exchange(size)
    results: list[Any] = [None] * size
    raised: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(rank, ThreadWire(shared, rank))
        except threading.BrokenBarrierError as error:
            raised.append(error)
        except BaseException as error:
            raised.insert(0, error)
            shared.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _SECONDS)
    if raised:
        raise raised[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a rank waits for a message that nobody sends")
    return results
