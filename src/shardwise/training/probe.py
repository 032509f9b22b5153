"""Show by trying that a function mixes samples: change one of them, and see whether others answer.

Torch has more functions than anybody described. Where one runs whole, random numbers tell what it does along
the samples; they prove that it mixes them, never that it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree

from shardwise.graph import Layer, ModuleTarget, Operand, Source
from shardwise.graph.canonical import name_of
from shardwise.graph.interpret import call
from shardwise.training.sample_dims import Dims, carries

Carried = tuple[Operand, Dims]
"""Something a layer reads, and where its samples are."""
_MOST_ELEMENTS = 2**22


def mixes_samples(layer: Layer, reads: Sequence[Carried], grown: Sequence[int | None], samples: int) -> bool:
    """Tell whether a function that runs whole is seen to mix samples.

    Args:
        layer: what runs it.
        reads: those of its operands that have samples, and where.
        grown: the dimension of each result that grows with the samples, if there is one.
        samples: how many there are.
    """
    operands = layer.operands
    if layer.call is None or isinstance(layer.call.target, ModuleTarget) or not name_of(layer.call.target):
        return False
    small = sum(o.spec.numel for o in operands) <= _MOST_ELEMENTS
    # Indices and masks that are made up would not be those that the network makes.
    if not small or not all(o.spec.is_float and o.origin is Source.VALUE for o in operands):
        return False
    if not all(_is_first(dims) for _, dims in reads):
        return False
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(o.spec.shape, generator=generator).to(getattr(torch, o.spec.dtype)) for o in operands]
    before, again = _result(layer, given, 0), _result(layer, given, 1)
    if not before or not _alike(before, again) or len(before) != len(grown):
        return False  # it draws random numbers, or numbers like these do not suit it
    for sample in (0, samples - 1):  # running sums answer later samples only
        changed = [tensor.clone() for tensor in given]
        for operand, dims in reads:
            part = changed[operands.index(operand)]
            along = _along(dims)[0]
            length = part.shape[along] // samples
            part.narrow(along, sample * length, length).add_(3.0)
        after = _result(layer, changed, 0)
        pairs = zip(before, after, grown, strict=True)
        if any(not _alike_but(sample, samples, *pair) for pair in pairs):
            return True
    return False


def _along(dims: Dims) -> list[int]:
    return [d for d, factors in enumerate(dims) if carries(factors)]


def _is_first(dims: Dims) -> bool:
    """Tell whether what belongs to a sample is one range of one dimension."""
    along = _along(dims)
    return len(along) == 1 and bool(dims[along[0]][0][1])


def _result(layer: Layer, tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            result = call(layer, [tensor.clone() for tensor in tensors], {})
        except (RuntimeError, ValueError):
            return []
    return [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _alike_but(sample: int, samples: int, before: Tensor, after: Tensor, dim: int | None) -> bool:
    """Tell whether two results agree in all that belongs to other samples."""
    if dim is None:
        return _alike([before], [after])
    length = before.shape[dim] // samples
    others = [i for i in range(before.shape[dim]) if i // max(1, length) != sample]
    rows = torch.tensor(others, dtype=torch.int64)
    return _alike([before.index_select(dim, rows)], [after.index_select(dim, rows)])


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(torch.allclose(a, b, equal_nan=True) for a, b in pairs)
