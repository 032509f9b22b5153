"""The error of a plan that cannot be carried out."""

from __future__ import annotations


class PlanError(ValueError):
    """Say which field of a plan is wrong, why, and what would work."""

    def __init__(self, field: str, found: str, remedy: str = "") -> None:
        self.field, self.found, self.remedy = field, found, remedy
        super().__init__(f"plan field {field!r}: {found}" + (f"; {remedy}" if remedy else ""))
