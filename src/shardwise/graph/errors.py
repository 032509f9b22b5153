"""What capture says when it cannot describe a model."""

from __future__ import annotations


class CaptureError(ValueError):
    """A model that cannot be captured as a graph; the message names the line of the user's code.

    Args:
        what: what was found, in a sentence.
        where: file and line in the user's code, if known.
    """

    def __init__(self, what: str, where: str = "") -> None:
        place = f"{where}: " if where else ""
        super().__init__(
            f"{place}{what}\nThis model cannot be split by layers, tiles or channels. "
            "Data parallelism still works, since it needs no graph: use a plan with data replicas only."
        )
        self.what = what
        self.where = where


class SizeError(CaptureError):
    """A capture that does not hold for other sizes, because the model's code decided by the size."""

    def __init__(self, what: str, where: str = "") -> None:
        place = f"{where}: " if where else ""
        ValueError.__init__(self, f"{place}{what}. Capture the model again with an example of this size.")
        self.what = what
        self.where = where


class DataControlFlow(Exception):
    """Raised while tracing where the model's code decides by the values of a tensor."""

    def __str__(self) -> str:
        return "control flow depends on the values of a tensor, not only on its shape"


class Opaque(Exception):
    """Raised by a rule that does not understand a call: the layer then runs whole, for this reason."""
