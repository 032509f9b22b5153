"""What a training run was like: one row of numbers per epoch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class History:
    """The epochs of a run.

    Args:
        plan: the resolved plan in one line.
        ranks: how many ranks took part.
        epochs: for each epoch its numbers by name: `loss`, `seconds`, `val_loss`, `val_<metric>` ...
        stopped: why training ended early, or empty.
        predicted: what the oracle said of a step, if it chose the plan: `step_seconds`, `step_bytes`.
        measured: the same, as measured in the first epoch.
    """

    plan: str = ""
    ranks: int = 1
    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> list[float]:
        """Return one number over all epochs."""
        return [epoch[name] for epoch in self.epochs]

    def __len__(self) -> int:
        return len(self.epochs)

    def save(self, path: str | Path) -> None:
        """Write the history as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        names = list(self.epochs[-1]) if self.epochs else []
        lines = ["epoch " + " ".join(f"{name:>12}" for name in names)]
        for i, epoch in enumerate(self.epochs):
            lines.append(f"{i + 1:5} " + " ".join(f"{epoch.get(name, float('nan')):12.5g}" for name in names))
        if self.stopped:
            lines.append(self.stopped)
        return "\n".join([f"{self.plan} on {self.ranks} ranks", *lines])
