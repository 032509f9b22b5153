"""The error of a machine description that cannot be used."""

from __future__ import annotations


class MachineError(ValueError):
    """Say which field of a machine is wrong, what was found there, and what would work."""

    def __init__(self, field: str, found: str, remedy: str = "") -> None:
        self.field, self.found, self.remedy = field, found, remedy
        super().__init__(f"machine field {field!r}: {found}" + (f"; {remedy}" if remedy else ""))
