"""Sum gradients over all ranks that hold the same parameter, in buckets, while backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.runtime.events import Recorder
from shardwise.runtime.wire import Pending, Wire

BUCKET_BYTES = 25 * 2**20
SINGLE_BYTES = 4 * 2**20
"""A gradient of at least this size is summed where it is: one more message costs less than the copy."""
PIECE_BYTES = 16 * 2**20
"""A sum of more than this is done in pieces, two at a time: transports need as much memory again for each."""


class _Bucket:
    """Some parameters that the same ranks share, reduced as one flat tensor."""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> None:
        self.names = tuple(names)
        self.parameters = [parameters[name] for name in names]
        self.flat: Tensor | None = None
        self.views: list[Tensor] = []
        self.order = _order_of(self.parameters[0])
        if len(names) > 1:
            self.flat, self.views = _flat(self.parameters)
        self.what = f"gradients of {self.names[0]} and {len(self.names) - 1} more"
        self.waiting = set(self.names)

    def gathered(self) -> Tensor:
        """Return all gradients as one tensor: a copy of several, the one of a single parameter itself."""
        if self.flat is None:
            (parameter,) = self.parameters
            return _in_memory_order(parameter, self.order)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        return self.flat


def _flat(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Return room for the gradients of all parameters, and the part of each."""
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    pieces = torch.split_with_sizes(flat, [p.numel() for p in parameters])
    return flat, [_stored_like(p, piece) for piece, p in zip(pieces, parameters, strict=True)]


def _order_of(parameter: Tensor) -> list[int]:
    """Return the dimensions of a parameter in the order of its memory."""
    strides = parameter.stride()
    return sorted(range(parameter.ndim), key=lambda d: -strides[d])


def _stored_like(parameter: Tensor, row: Tensor) -> Tensor:
    """Return a row of elements in the shape of a parameter, and in the order of its memory."""
    order = _order_of(parameter)
    shape = [parameter.shape[d] for d in order]
    return row.view(shape).permute([order.index(d) for d in range(parameter.ndim)])


def _in_memory_order(parameter: nn.Parameter, order: list[int]) -> Tensor:
    """Return the gradient of a parameter as one row, in the order in which all ranks store the parameter."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if not grad.permute(order).is_contiguous():
        grad = _stored_like(parameter, grad.new_empty(grad.numel())).copy_(grad)
    parameter.grad = grad
    return grad.permute(order).view(-1)


def _sizes(total: int, most: int) -> list[int]:
    """Cut a length into parts of at most so many."""
    return [min(most, total - start) for start in range(0, total, most)]


class _Line:
    """The sums over one wire, in one order on all of its ranks, not too many bytes of them at a time."""

    def __init__(self, wire: Wire, recorder: Recorder) -> None:
        self.wire, self.recorder = wire, recorder
        self.buckets: list[_Bucket] = []
        self.next = 0
        self.queue: deque[tuple[Tensor, str]] = deque()
        self.flying: deque[tuple[Pending, int]] = deque()

    def launch_complete(self) -> None:
        """Start the buckets whose turn it is, as far as they are complete."""
        while self.next < len(self.buckets) and not self.buckets[self.next].waiting:
            self.launch()
        self.pump()

    def launch(self) -> None:
        """Start the next bucket."""
        bucket = self.buckets[self.next]
        self.next += 1
        tensor = bucket.gathered()
        size = max(1, PIECE_BYTES // tensor.element_size())
        self.queue.extend(
            (piece, bucket.what) for piece in torch.split_with_sizes(tensor, _sizes(tensor.numel(), size))
        )
        self.pump()

    def pump(self, everything: bool = False) -> None:
        """Take note of sums that are complete, and start others until two pieces are under way."""
        while self.flying and self.flying[0][0].done():
            self.flying.popleft()[0].wait()
        flying = sum(nbytes for _, nbytes in self.flying)
        limit = 2 * PIECE_BYTES
        while self.queue and (everything or not flying or flying + self.queue[0][0].nbytes <= limit):
            piece, what = self.queue.popleft()
            self.recorder.mark("reduce", what)
            self.flying.append((self.wire.start_all_reduce(piece, what), piece.nbytes))
            flying += piece.nbytes

    def finish(self) -> None:
        """Wait for every sum."""
        while self.flying:
            self.flying.popleft()[0].wait()
            self.pump()
        self.next = 0
        for bucket in self.buckets:
            bucket.waiting = set(bucket.names)


class Reducer:
    """Reduce the gradients of a rank's parameters.

    All ranks of a wire have the same buckets and start them in the same order, that of the list: a bucket
    that is complete early waits for those before it. (A rank that plays two stages completes them in
    another order than its mirror rank does, and sums on one wire must not cross.)
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        wires: Mapping[str, Wire],
        order: Sequence[Sequence[str]],
        bucket_bytes: int = BUCKET_BYTES,
        recorder: Recorder | None = None,
        early: bool = True,
    ) -> None:
        """Prepare the buckets.

        Args:
            parameters: the local parameters by name.
            wires: for each parameter that other ranks hold too, the wire that joins them.
            order: the parameter names of each stage in the order in which backward completes them.
            bucket_bytes: how much to gather before a reduction is started.
            recorder: is told when each reduction starts.
            early: start sums while backward goes on, not behind it.
        """
        self.early = early
        self.recorder = recorder or Recorder()
        self.lines: dict[int, _Line] = {}
        self.of: dict[str, tuple[_Line, _Bucket]] = {}
        for names in order:
            filling: dict[tuple[int, torch.dtype], list[str]] = {}
            for name in names:
                if name not in wires or name not in parameters or not parameters[name].requires_grad:
                    continue
                if parameters[name].nbytes >= SINGLE_BYTES:
                    self._close([name], parameters, wires)
                    continue
                key = (id(wires[name]), parameters[name].dtype)
                filling.setdefault(key, []).append(name)
                if sum(parameters[n].nbytes for n in filling[key]) >= bucket_bytes:
                    self._close(filling.pop(key), parameters, wires)
            for rest in filling.values():
                self._close(rest, parameters, wires)

    def _close(
        self, names: list[str], parameters: Mapping[str, nn.Parameter], wires: Mapping[str, Wire]
    ) -> None:
        wire = wires[names[0]]
        line = self.lines.setdefault(id(wire), _Line(wire, self.recorder))
        line.buckets.append(_Bucket(names, parameters))
        self.of.update(dict.fromkeys(names, (line, line.buckets[-1])))

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of what gradients are gathered and added up in."""
        buckets = [bucket for line in self.lines.values() for bucket in line.buckets]
        gathered = sum(bucket.flat.nbytes for bucket in buckets if bucket.flat is not None)
        return gathered + sum(line.wire.shared_bytes for line in self.lines.values())

    def ready(self, name: str) -> None:
        """Note that the gradient of a parameter is complete on this rank."""
        if name in self.of:
            line, bucket = self.of[name]
            bucket.waiting.discard(name)
            if self.early:
                line.launch_complete()

    def finish(self) -> None:
        """Launch what is left and wait for every sum."""
        for line in self.lines.values():
            while line.next < len(line.buckets):
                line.launch()
        if len(self.lines) > 1:
            # A rank that waits on one wire starts nothing on another, where its peers may wait for it.
            for line in self.lines.values():
                line.pump(everything=True)
        for line in self.lines.values():
            line.finish()
