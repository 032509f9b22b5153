"""What torch itself says about a model: outputs, flops, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from shardwise.graph import Graph, interpret


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def run(graph: Graph, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    return interpret.run(graph, inputs, interpret.state_of(model), dict(model.named_modules()))


def assert_same(found: Any, wanted: Any) -> None:
    a, b = tensors_in(found), tensors_in(wanted)
    assert len(a) == len(b) > 0
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Measured:
    forward_flops: int
    backward_flops: int
    saved_bytes: int


def measure(model: nn.Module, inputs: Sequence[Tensor]) -> Measured:
    """Run one forward and backward pass and count what torch counts."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with FlopCounterMode(display=False) as forward, hooks:
        outputs = tensors_in(model(*inputs))
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward([out.sum() for out in outputs])
    return Measured(forward.get_total_flops(), backward.get_total_flops(), saved)
