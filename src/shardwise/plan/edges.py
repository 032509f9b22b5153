"""A value that crosses from one stage to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edge:
    """Send `value` directly from the stage that makes it to one stage that reads it.

    A value with readers in several stages has one edge for each of them, skips included. If the edge is
    `differentiable` a gradient returns from `target` to `source`; the gradients of several edges add up.
    """

    value: str
    source: int
    target: int
    differentiable: bool = True

    def __str__(self) -> str:
        return f"{self.value}[{self.source}→{self.target}]"
