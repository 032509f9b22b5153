"""Plain numbers among inputs and targets: a captured model and loss hold those of the example for good."""

from __future__ import annotations

from numbers import Number
from typing import Any

from shardwise.graph.trace import leaves


def numbers_in(tree: Any) -> list[Any]:
    """Return the plain numbers and words of an input or a target, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, (Number, str))]


def check_numbers(field: str, tree: Any, example: list[Any]) -> None:
    """Refuse an input or target whose plain numbers are not those of the example.

    Args:
        field: what it is called.
        tree: the input or target of a step.
        example: the numbers of the example's.
    """
    found = numbers_in(tree)
    if found != example:
        raise ValueError(
            f"{field}: found the plain numbers {found}, the example had {example}, which are part of the "
            "captured model and loss; pass what changes as a tensor with one value per sample"
        )
