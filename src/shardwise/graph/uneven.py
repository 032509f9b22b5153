"""Tell which calls may treat one number of samples unlike another without leaving a layer that shows it.

`x[:32]` returns fewer samples than it is given, or all of them: then there is nothing to see in the graph.
And `n // 16` grows with the number of samples by steps.
"""

from __future__ import annotations

from typing import Any

from shardwise.graph.canonical import name_of
from shardwise.graph.trace import Step

_BY_STEPS = {"floordiv", "__floordiv__", "floor_divide", "mod", "__mod__", "remainder", "fmod"}
_BY_STEPS |= {"ceil", "floor", "round", "__ceil__", "__floor__", "__round__"}
_BY_STEPS |= {"min", "max", "minimum", "maximum"}
_PARTS = {"chunk", "unsafe_chunk", "split", "split_with_sizes", "unsafe_split", "tensor_split"}
_PARTS |= {"narrow", "narrow_copy", "slice_copy", "aten.slice", "aten.split", "aten.select"}


def may_decide(step: Step) -> bool:
    """Tell whether a step was traced for one way among several, or may go another for more samples."""
    if step.guard is not None:
        return True
    name = name_of(step.target)
    if name in ("getitem", "__getitem__") and len(step.args) > 1:
        return _may_clamp(step.args[1])
    return name in _BY_STEPS | _PARTS


def _may_clamp(index: Any) -> bool:
    """Tell whether an index may end behind the samples that there are; what it leaves out shows otherwise."""
    first = index[0] if isinstance(index, tuple) and index else index
    return (isinstance(first, slice) and first.stop is not None) or first is Ellipsis
