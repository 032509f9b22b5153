"""The handle of an operation under way: torch's `Work` over one MPI request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime.completer import Outstanding, Owed
from shardwise.runtime.errors import StalledError
from shardwise.runtime.mpi.buffers import Finish
from shardwise.runtime.mpi.library import load
from shardwise.runtime.poller import Adopted, Poller, Request


class Batch:
    """Make several requests look like one."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._pending = list(requests)

    def Test(self) -> bool:
        """Return whether all requests are complete."""
        self._pending = [request for request in self._pending if not request.Test()]
        return not self._pending


class Promised:
    """Look at the future that the completer settles."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def Test(self) -> bool:
        """Return whether the future is settled; raise what went wrong."""
        if not self._future.done():
            return False
        self._future.value()
        return True


class Party(Protocol):
    """What a handle needs to know of its group."""

    poller: Poller
    label: str
    me: int
    threaded: bool


class MPIWork(dist.Work):
    """Wait for, or ask after, one operation of the backend."""

    _stalled = False

    def __init__(
        self,
        party: Party,
        request: Request,
        deadline_seconds: float,
        name: str,
        ranks: Sequence[int],
        outputs: list[Tensor],
        keep: object,
        finish: Finish | None = None,
    ) -> None:
        super().__init__()
        self._party = party
        self._request: Request | None = request
        self._deadline_seconds = deadline_seconds
        self._name = name
        self._ranks = ranks
        self._outputs = outputs
        # MPI does not own the buffers: they live as long as the request does.
        self._keep = keep
        self._finish = finish
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is complete, or raise `StalledError` after the timeout."""
        request = self._request
        if request is not None:
            seconds = self._deadline_seconds
            # Callers in C++ pass zero for "no timeout given".
            if timeout is not None and (asked := timeout.total_seconds()) > 0:
                seconds = asked
            try:
                self._party.poller.wait(request, seconds, self.describe, self._ranks)
            except StalledError:
                self._stalled = True
                raise
            self._complete()
        return True

    def describe(self) -> str:
        """Return who does what with whom, for error messages."""
        parts = [f"rank {self._party.me}: {self._name}"]
        if self._name in ("send", "recv"):
            parts.append(f"peer rank {self._ranks[0]}")
        shown = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self._outputs[:3]]
        if len(self._outputs) > 3:
            shown.append(f"and {len(self._outputs) - 3} more")
        if shown:
            parts.append("tensor " + ", ".join(shown))
        return ", ".join(parts) + f" (group {self._party.label})"

    def is_completed(self) -> bool:
        """Return whether the operation is complete, letting it progress meanwhile."""
        if self._request is not None:
            if not self._request.Test():
                return False
            self._complete()
        return True

    def is_success(self) -> bool:
        """Return whether the operation completed; failures are raised by `wait`."""
        return self.is_completed()

    def synchronize(self) -> None:
        """Wait, because host memory has no stream to order behind."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that were written."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """Return a future of the outputs, which is completed by a thread while others compute."""
        if self._future is None:
            devices: list[int | str | torch.device] = list({t.device for t in self._outputs if not t.is_cpu})
            self._future = torch.futures.Future(devices=devices)
            self._promise(self._future)
        return self._future

    def _promise(self, future: Any) -> None:
        if not self._party.threaded:
            # This MPI was built for one thread at a time: nobody could drive it while a waiter sleeps.
            self.wait()
        request = self._request
        if request is None:
            future.set_result(self._outputs)
            return
        outputs, finish, keep = self._outputs, self._finish, self._keep

        def settle(keep: object = keep) -> list[Tensor]:
            if finish is not None:
                finish()
            return outputs

        # MPI forbids two threads to test one request: from now on this handle only looks at the future.
        self._request, self._finish, self._keep = Promised(future), None, None
        since = Outstanding(self.describe, self._ranks, time.monotonic())
        self._party.poller.completer.add(Owed(request, settle, future, self._deadline_seconds, since))

    def _complete(self) -> None:
        self._request = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        self._keep = None

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None and self._future is None and not load().Is_finalized():
            keep = (self._keep, self._outputs)
            self._party.poller.adopt(Adopted(request, keep, self._finish, not self._stalled))


class ReceivedFromAny(MPIWork):
    """A receive from whichever rank sends first, which then says who it was."""

    status: Any = None
    members: Sequence[int] = ()

    def _source_rank(self) -> int:
        return self.members[int(self.status.Get_source())]

    def source_rank(self) -> int:
        """Return the global rank the message came from."""
        return self._source_rank()


class StatusRequest:
    """A request whose test also fills in a status."""

    def __init__(self, request: Any, status: Any) -> None:
        self._request, self._status = request, status

    def Test(self) -> bool:
        """Return whether the request is complete."""
        return bool(self._request.Test(self._status))
