"""Sum gradients over all ranks that hold the same parameter, in buckets, while backward still runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.runtime.events import Recorder
from shardwise.runtime.wire import Pending, Wire

BUCKET_BYTES = 25 * 2**20
SINGLE_BYTES = 2**20
"""A gradient of at least this size is summed where it is: one more message costs less than the copy."""


class _Bucket:
    """Some parameters that the same ranks share, reduced as one flat tensor."""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, nn.Parameter], wire: Wire) -> None:
        self.names, self.wire = tuple(names), wire
        self.parameters = [parameters[name] for name in names]
        self.flat, self.views = _flat(self.parameters) if len(names) > 1 else (None, [])
        self.what = f"gradients of {self.names[0]} and {len(self.names) - 1} more"
        self.waiting = set(self.names)
        self.pending: Pending | None = None

    def launch(self) -> None:
        self.pending = self.wire.start_all_reduce(self._gathered(), self.what)

    def _gathered(self) -> Tensor:
        """Return all gradients as one tensor: a copy of several, the one of a single parameter itself."""
        if self.flat is None:
            (parameter,) = self.parameters
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = grad.contiguous()
            return parameter.grad
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        return self.flat

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        self.pending = None
        self.waiting = set(self.names)


def _flat(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Return room for the gradients of all parameters, and the part of each."""
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    pieces = torch.split_with_sizes(flat, [p.numel() for p in parameters])
    return flat, [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


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
    ) -> None:
        """Prepare the buckets.

        Args:
            parameters: the local parameters by name.
            wires: for each parameter that other ranks hold too, the wire that joins them.
            order: the parameter names of each stage in the order in which backward completes them.
            bucket_bytes: how much to gather before a reduction is started.
            recorder: is told when each reduction starts.
        """
        self.recorder = recorder or Recorder()
        self.buckets: list[_Bucket] = []
        self.of: dict[str, _Bucket] = {}
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
        self._lines: dict[int, list[_Bucket]] = {}
        for bucket in self.buckets:
            self._lines.setdefault(id(bucket.wire), []).append(bucket)
        self._next = dict.fromkeys(self._lines, 0)

    def _close(
        self, names: list[str], parameters: Mapping[str, nn.Parameter], wires: Mapping[str, Wire]
    ) -> None:
        bucket = _Bucket(names, parameters, wires[names[0]])
        self.buckets.append(bucket)
        self.of.update(dict.fromkeys(names, bucket))

    def ready(self, name: str) -> None:
        """Note that the gradient of a parameter is complete on this rank."""
        bucket = self.of.get(name)
        if bucket is None:
            return
        bucket.waiting.discard(name)
        line = self._lines[id(bucket.wire)]
        while self._next[id(bucket.wire)] < len(line):
            head = line[self._next[id(bucket.wire)]]
            if head.waiting:
                return
            self._launch(head)

    def _launch(self, bucket: _Bucket) -> None:
        bucket.launch()
        self._next[id(bucket.wire)] += 1
        self.recorder.mark("reduce", bucket.what)

    def finish(self) -> None:
        """Launch what is left and wait for every sum."""
        for key, line in self._lines.items():
            for bucket in line[self._next[key] :]:
                self._launch(bucket)
        for bucket in self.buckets:
            bucket.finish()
        self._next = dict.fromkeys(self._lines, 0)
