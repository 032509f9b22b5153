"""The table of rules: name of a function -> how to describe a call of it as layers.

A rule is a function `rule(site, *args, **kwargs)` whose own signature is that of the torch function, so that
Python itself sorts the arguments. It adds layers through `site` and returns their values, or raises
`Opaque(reason)` if it does not understand this call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shardwise.graph.errors import Opaque
from shardwise.graph.site import Site

Rule = Callable[..., Any]
Function = TypeVar("Function", bound=Rule)
_RULES: dict[str, Rule] = {}
# The same argument under numpy's and under aten's name.
_SYNONYMS = {"axis": "dim", "keepdims": "keepdim", "self": "input"}


def rule(*names: str) -> Callable[[Function], Function]:
    """Register a rule for functions by their name."""

    def register(function: Function) -> Function:
        for name in names:
            if name in _RULES:
                raise ValueError(f"two rules for {name!r}: {_RULES[name].__name__} and {function.__name__}")
            _RULES[name] = function
        return function

    return register


_signature = functools.cache(inspect.signature)


def has_rule(name: str) -> bool:
    """Tell whether there is a rule for a function's name."""
    return name in _RULES


def apply_rule(name: str, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Describe a call by its rule."""
    function = _RULES[name]
    named = {_SYNONYMS.get(key, key): value for key, value in kwargs.items()}
    try:
        bound = _signature(function).bind(site, *args, **named)
    except TypeError as error:
        raise Opaque(f"this form of {name} is not understood: {error}") from error
    return function(*bound.args, **bound.kwargs)
