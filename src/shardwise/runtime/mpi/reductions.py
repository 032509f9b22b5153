"""Collectives that add, compare or combine."""

# torch calls these by position and declares several overloads of each; one signature serves them all.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime.mpi import types
from shardwise.runtime.mpi.buffers import Finish, direct, flat_readable, memory, readable
from shardwise.runtime.mpi.core import Core, as_list, in_chain
from shardwise.runtime.mpi.work import Batch, MPIWork

_SUM = dist.ReduceOp(dist.ReduceOp.SUM)


def _prepared(tensor: Tensor, op: Any, recipe: types.Recipe) -> Tensor:
    """Return what this rank contributes: widened, scaled and contiguous; the tensor itself if it can be."""
    if recipe.widened:
        tensor = tensor.float()
    if recipe.scaled:
        tensor = tensor * types.factor(op)
    return readable(tensor)


def _average(tensor: Tensor, size: int) -> None:
    if tensor.dtype == torch.bool:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(size)
    else:
        tensor.div_(size, rounding_mode="trunc")


class Reductions(Core):
    """All-reduce, reduce and reduce-scatter in all their forms."""

    def _settle(self, tensor: Tensor, result: Tensor, recipe: types.Recipe) -> Finish | None:
        """Return what turns the reduced buffer into the tensor's final value, if anything is left to do."""
        if result is tensor and not recipe.averaged:
            return None

        def finish() -> None:
            with torch.no_grad():
                if recipe.averaged:
                    _average(result, self._size)
                if result is not tensor:
                    tensor.copy_(result.view(tensor.shape))

        return finish

    def _start_allreduce(self, tensor: Tensor, op: Any) -> tuple[Any, Tensor, Finish | None]:
        recipe = types.recipe(op, tensor.dtype)
        buffer = _prepared(tensor, op, recipe)
        spec = [memory(buffer), buffer.numel(), recipe.datatype]
        request = self.comm.Iallreduce(self._in_place, spec, recipe.operation)
        return request, buffer, self._settle(tensor, buffer, recipe)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start an all-reduce in place."""
        tensors = as_list(tensors)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts, timeout)
        request, keep, finish = self._start_allreduce(tensors[0], _op(opts))
        return self.submit(request, "all_reduce", tensors, keep, timeout or opts, finish)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: Any = None
    ) -> MPIWork:
        """Start the all-reduces of several tensors."""
        started = [self._start_allreduce(tensor, _op(opts)) for tensor in tensors]
        return self.submit(
            Batch([entry[0] for entry in started]),
            "all_reduce_coalesced",
            list(tensors),
            started,
            timeout or opts,
            in_chain([entry[2] for entry in started]),
        )

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> MPIWork:
        """Start a reduction whose result only the root receives."""
        tensors = as_list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        reduce_op = _op(op) if isinstance(opts, int) else _op(opts)
        (tensor,) = tensors
        recipe = types.recipe(reduce_op, tensor.dtype)
        buffer = _prepared(tensor, reduce_op, recipe)
        spec = [memory(buffer), buffer.numel(), recipe.datatype]
        finish = None
        if self._rank == root:
            request = self.comm.Ireduce(self._in_place, spec, recipe.operation, root)
            finish = self._settle(tensor, buffer, recipe)
        else:
            request = self.comm.Ireduce(spec, None, recipe.operation, root)
        return self.submit(request, "reduce", tensors, buffer, timeout or opts, finish)

    def _start_reduce_scatter(
        self, output: Tensor, flat: Tensor, op: Any
    ) -> tuple[Any, object, Finish | None]:
        """Start a reduce-scatter of a flat input of `size` equal parts."""
        if flat.numel() != output.numel() * self._size:
            raise ValueError(
                f"reduce_scatter: input has {flat.numel()} elements, output {output.numel()}; "
                f"with {self._size} ranks the input needs {output.numel() * self._size}"
            )
        recipe = types.recipe(op, flat.dtype)
        source = _prepared(flat, op, recipe)
        if source.dtype == output.dtype and direct(output):
            result = output
        else:
            result = torch.empty(output.numel(), dtype=source.dtype, device=source.device)
        # Without a count mpi4py divides the buffer by the ranks; a count would mean one rank's part.
        request = self.comm.Ireduce_scatter_block(
            [memory(source), recipe.datatype],
            [memory(result), result.numel(), recipe.datatype],
            recipe.operation,
        )
        return request, (source, result), self._settle(output, result, recipe)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MPIWork:
        """Start a reduce-scatter of a list of tensors, which may differ in size between ranks."""
        (output,) = as_list(outputs)
        parts: list[Tensor] = list(inputs[0]) if isinstance(inputs[0], (list, tuple)) else list(inputs)
        op = _op(opts)
        counts = [part.numel() for part in parts]
        flat = flat_readable(parts)
        if all(count == counts[0] for count in counts):
            request, keep, finish = self._start_reduce_scatter(output, flat, op)
        else:
            recipe = types.recipe(op, flat.dtype)
            source = _prepared(flat, op, recipe)
            result = torch.empty(output.numel(), dtype=source.dtype, device=source.device)
            request = self.comm.Ireduce_scatter(
                [memory(source), source.numel(), recipe.datatype],
                [memory(result), result.numel(), recipe.datatype],
                counts,
                recipe.operation,
            )
            keep, finish = (source, result), self._settle(output, result, recipe)
        return self.submit(request, "reduce_scatter", [output], (keep, flat), timeout or opts, finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MPIWork:
        """Start a reduce-scatter of one tensor of `size` equal parts."""
        request, keep, finish = self._start_reduce_scatter(output, input, _op(opts))
        return self.submit(request, "reduce_scatter_tensor", [output], keep, opts, finish)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> MPIWork:
        """Start the reduce-scatters of several tensors."""
        started = [
            self._start_reduce_scatter(output, source, _op(opts))
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self.submit(
            Batch([entry[0] for entry in started]),
            "reduce_scatter_tensor_coalesced",
            list(outputs),
            started,
            opts,
            in_chain([entry[2] for entry in started]),
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _op(opts: Any) -> Any:
    if opts is None:
        return _SUM
    # An operation's bare name says that it is an instance of ReduceOp, too.
    if isinstance(opts, dist.ReduceOp.RedOpType):
        return dist.ReduceOp(opts)
    if isinstance(opts, dist.ReduceOp):
        return opts
    return opts.reduceOp
