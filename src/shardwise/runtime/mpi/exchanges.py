"""Collectives that move data without changing it; all of them move bytes."""

# torch calls these by position and declares several overloads of each; one signature serves them all.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from shardwise.runtime.mpi.buffers import (
    Finish,
    flat_readable,
    flat_writable,
    memory,
    readable,
    writable,
)
from shardwise.runtime.mpi.core import Core, as_list, in_chain
from shardwise.runtime.mpi.work import Batch, MPIWork


class Exchanges(Core):
    """Broadcast, gather, scatter, all-gather, all-to-all and barrier."""

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [memory(tensor), tensor.nbytes, self._byte]

    def _parts(self, tensor: Tensor, sizes: Sequence[int]) -> list[Any]:
        """Describe a flat buffer as one part per rank, `sizes` in bytes."""
        return [memory(tensor), (list(sizes), [0, *accumulate(sizes)][: len(sizes)]), self._byte]

    def barrier(self, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start a barrier."""
        return self.submit(self.comm.Ibarrier(), "barrier", [], None, timeout or opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start a broadcast of one or several tensors from a rank of this group."""
        tensors = as_list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        started: list[tuple[Any, Tensor, Finish | None]] = []
        for tensor in tensors:
            buffer, finish = (readable(tensor), None) if self._rank == root else writable(tensor)
            started.append((self.comm.Ibcast(self._bytes(buffer), root), buffer, finish))
        request = started[0][0] if len(started) == 1 else Batch([entry[0] for entry in started])
        finish = in_chain([entry[2] for entry in started])
        return self.submit(request, "broadcast", tensors, started, timeout or opts, finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start an all-gather into a list of tensors, which may differ in size between ranks."""
        (tensor,) = as_list(inputs)
        targets: list[Tensor] = list(outputs[0]) if isinstance(outputs[0], (list, tuple)) else list(outputs)
        request, keep, finish = self._start_allgather(targets, tensor)
        return self.submit(request, "all_gather", targets, keep, timeout or opts, finish)

    def _start_allgather(self, targets: Sequence[Tensor], tensor: Tensor) -> tuple[Any, object, Finish]:
        source = readable(tensor)
        flat, finish = flat_writable(targets)
        sizes = [target.nbytes for target in targets]
        request = self.comm.Iallgatherv(self._bytes(source), self._parts(flat, sizes))
        return request, (source, flat), finish

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> MPIWork:
        """Start the all-gathers of several tensors; `outputs[r][i]` is tensor i of rank r."""
        started = [
            self._start_allgather([row[index] for row in outputs], tensor)
            for index, tensor in enumerate(inputs)
        ]
        return self.submit(
            Batch([entry[0] for entry in started]),
            "all_gather_coalesced",
            [tensor for row in outputs for tensor in row],
            started,
            opts,
            in_chain([entry[2] for entry in started]),
        )

    def _start_allgather_single(self, output: Tensor, tensor: Tensor) -> tuple[Any, object, Finish | None]:
        if output.numel() != tensor.numel() * self._size:
            raise ValueError(
                f"all_gather_into_tensor: output has {output.numel()} elements, input {tensor.numel()}; "
                f"with {self._size} ranks the output needs {tensor.numel() * self._size}"
            )
        source = readable(tensor)
        target, finish = writable(output)
        # Without a count mpi4py divides the buffer by the ranks; a count would mean one rank's part.
        request = self.comm.Iallgather(self._bytes(source), [memory(target), self._byte])
        return request, (source, target), finish

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MPIWork:
        """Start an all-gather into one tensor."""
        request, keep, finish = self._start_allgather_single(output, input)
        return self.submit(request, "all_gather_into_tensor", [output], keep, opts, finish)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> MPIWork:
        """Start the all-gathers of several tensors, each into one."""
        started = [
            self._start_allgather_single(output, tensor)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self.submit(
            Batch([entry[0] for entry in started]),
            "all_gather_into_tensor_coalesced",
            list(outputs),
            started,
            opts,
            in_chain([entry[2] for entry in started]),
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start a gather into a list of tensors on the root."""
        (tensor,) = as_list(inputs)
        root = opts if isinstance(opts, int) else opts.rootRank
        source = readable(tensor)
        if self._rank != root:
            request = self.comm.Igatherv(self._bytes(source), None, root)
            return self.submit(request, "gather", [tensor], source, timeout or opts)
        targets: list[Tensor] = list(outputs[0]) if isinstance(outputs[0], (list, tuple)) else list(outputs)
        flat, finish = flat_writable(targets)
        parts = self._parts(flat, [target.nbytes for target in targets])
        request = self.comm.Igatherv(self._bytes(source), parts, root)
        return self.submit(request, "gather", targets, (source, flat), timeout or opts, finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start a scatter of the root's list of tensors."""
        (output,) = as_list(outputs)
        root = opts if isinstance(opts, int) else opts.rootRank
        target, finish = writable(output)
        if self._rank != root:
            request = self.comm.Iscatterv(None, self._bytes(target), root)
            return self.submit(request, "scatter", [output], target, timeout or opts, finish)
        sources: list[Tensor] = list(inputs[0]) if isinstance(inputs[0], (list, tuple)) else list(inputs)
        flat = flat_readable(sources)
        parts = self._parts(flat, [source.nbytes for source in sources])
        request = self.comm.Iscatterv(parts, self._bytes(target), root)
        return self.submit(request, "scatter", [output], (target, flat), timeout or opts, finish)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> MPIWork:
        """Start an all-to-all of the first dimension's parts; no splits means equal ones."""
        source = readable(input)
        target, finish = writable(output)
        sends = self._splits(source, input_splits, "input")
        receives = self._splits(target, output_splits, "output")
        request = self.comm.Ialltoallv(self._parts(source, sends), self._parts(target, receives))
        return self.submit(request, "all_to_all_single", [output], (source, target), opts, finish)

    alltoall_base = all_to_all_single

    def _splits(self, tensor: Tensor, splits: Sequence[int], side: str) -> list[int]:
        """Return the bytes of each rank's part along the first dimension."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"all_to_all_single: {side} has {rows} rows, not a multiple of {self._size} ranks; "
                    f"pass {side}_split_sizes"
                )
            return [tensor.nbytes // self._size] * self._size
        if sum(splits) != rows or len(splits) != self._size:
            raise ValueError(
                f"all_to_all_single: {side}_split_sizes {list(splits)} do not add up to the {rows} rows of "
                f"the {side} over {self._size} ranks"
            )
        row_bytes = tensor.nbytes // rows if rows else 0
        return [split * row_bytes for split in splits]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start an all-to-all of lists of tensors."""
        targets, sources = list(outputs), list(inputs)
        flat_in = flat_readable(sources)
        flat_out, finish = flat_writable(targets)
        request = self.comm.Ialltoallv(
            self._parts(flat_in, [source.nbytes for source in sources]),
            self._parts(flat_out, [target.nbytes for target in targets]),
        )
        return self.submit(request, "all_to_all", targets, (flat_in, flat_out), timeout or opts, finish)
