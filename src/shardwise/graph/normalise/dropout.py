"""Dropout; in evaluation it is the identity."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from shardwise.geometry.access import same
from shardwise.graph import functional
from shardwise.graph.canonical import name_of
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site

_PER = {"dropout": "element", "dropout1d": "channel", "dropout2d": "channel", "dropout3d": "channel"}
_PER |= {"feature_dropout": "channel"}


@rule(*_PER)
def dropout(site: Site, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    """Describe dropout; in evaluation it is the identity."""
    return _dropout(site, input, p, training, _PER[name_of(site.step.target)])


@rule("aten.dropout", "aten.feature_dropout")
def aten_dropout(site: Site, input: Value, p: float, train: bool) -> Value:
    """Describe aten's dropout."""
    return _dropout(site, input, p, train, "channel" if "feature" in str(site.step.target) else "element")


def _dropout(site: Site, input: Value, p: float, training: bool, per: str) -> Value:
    reads = [("input", input, same(input.ndim))]
    if not training or p == 0.0:
        identity = functional.identity
        return site.emit(identity, (input,), {}, kind=Kind.ELEMENTWISE, op="identity", reads=reads)
    target = F.dropout
    if per == "channel":
        target = {3: F.dropout1d, 4: F.dropout2d, 5: F.dropout3d}.get(input.ndim, F.dropout2d)
    return site.emit(
        target,
        (input, p, True),
        {},
        kind=Kind.DROPOUT,
        op="dropout",
        reads=reads,
        attributes={"p": p, "per": per},
    )


@rule("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(
    site: Site, input: Value, p: float = 0.5, training: bool = False, inplace: Any = 0
) -> Value:
    """Leave alpha dropout to a whole layer; in evaluation it is the identity."""
    if training:
        raise Opaque("alpha dropout draws its own mask")
    return _dropout(site, input, p, False, "element")
