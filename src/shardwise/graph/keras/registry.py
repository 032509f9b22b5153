"""The table of rules: Keras class -> how a call of it becomes steps of torch functions.

A rule is a function `rule(scribe, layer, *args, **kwargs)` that gets flows where Keras passes tensors, and
returns the flow of the result. It raises `Opaque(reason)` if it does not understand this layer; the layer
is then entered by a symbolic call, or runs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]
_RULES: dict[type, Rule] = {}


def rule(*classes: type) -> Callable[[Rule], Rule]:
    """Register a function as the rule of Keras classes."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(classes, function))
        return function

    return register


def rule_of(operation: Any) -> Rule | None:
    """Return the rule of a layer or operation; a subclass counts while it computes nothing of its own."""
    for base in type(operation).__mro__:
        if base in _RULES:
            return _RULES[base]
        if "call" in vars(base) or "__call__" in vars(base):
            return None
    return None
