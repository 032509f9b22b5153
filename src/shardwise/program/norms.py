"""Which layers have statistics, and with whom a rank shares them."""

from __future__ import annotations

from shardwise.graph import Layer
from shardwise.program.assign import Home
from shardwise.program.replica_sum import REPLICA_SUM

_LIVE = {"batch_norm": "batch_statistics", "instance_norm": "instance_statistics"}


def has_statistics(layer: Layer) -> bool:
    """Tell whether a layer normalises with statistics of the values that it is given."""
    return layer.op == "group_norm" or bool(layer.attributes.get(_LIVE.get(layer.op, ""), False))


def updates_buffers(layer: Layer) -> bool:
    """Tell whether a layer changes buffers when it is computed."""
    if not layer.buffers:
        return False
    return layer.op == "module" or bool(layer.attributes.get(_LIVE.get(layer.op, ""), False))


def shared_over(layer: Layer, home: Home, replicated: bool) -> str:
    """Tell with whom the statistics of a layer are shared: `group`, `replicas` or nobody (empty)."""
    if layer.op == REPLICA_SUM:
        return "replicas" if replicated else ""
    if not has_statistics(layer):
        return ""
    cut = home.cuts.dims
    if layer.op == "batch_norm":
        if any(d != 1 for d in cut):
            return "group"
        return "replicas" if replicated else ""
    if layer.op == "instance_norm":
        # Running statistics are a mean over all samples.
        tracked = layer.operand("running_mean") is not None
        return "group" if any(d > 1 for d in cut) or (tracked and (replicated or 0 in cut)) else ""
    return "group" if any(d > 0 for d in cut) else ""
