"""Compare a split model with the unsplit one on the user's own model and data."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwise.graph.trace import transform
from shardwise.plan import Plan
from shardwise.training.job import is_alone, on_ranks
from shardwise.training.loss_graph import Loss
from shardwise.training.trainer import Trainer
from shardwise.training.unsplit import unsplit_step

TOLERANCE = 1e-10
# A gradient that is all rounding, such as that of a bias before a batch norm, has no scale of its own.
_FLOOR = 1e-6


@dataclass(frozen=True)
class Deviation:
    """How far one tensor of a layer is from the unsplit model's, relative to the largest value of it."""

    layer: str
    tensor: str
    error: float


@dataclass(frozen=True)
class CheckReport:
    """All deviations of one step under a plan.

    Args:
        plan: the plan in one line.
        loss: the loss of the unsplit model.
        rows: loss, gradients and statistics, in the order of the layers.
        tolerance: what counts as equal.
        notes: what to know about the comparison.
    """

    plan: str
    loss: float
    rows: tuple[Deviation, ...]
    tolerance: float = TOLERANCE
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Deviation:
        """Return the largest deviation."""
        return max(self.rows, key=lambda row: row.error)

    @property
    def ok(self) -> bool:
        """Tell whether all deviations are within the tolerance."""
        return self.worst.error <= self.tolerance

    def table(self) -> Table:
        """Return the deviations as a table, one line per layer."""
        table = Table("layer", "tensor", "error", title=f"{self.plan} against one device")
        by_layer: dict[str, list[Deviation]] = {}
        for row in self.rows:
            by_layer.setdefault(row.layer, []).append(row)
        for layer, rows in by_layer.items():
            for i, row in enumerate(rows):
                style = "" if row.error <= self.tolerance else "bold red"
                table.add_row(layer if i == 0 else "", row.tensor, f"{row.error:.1e}", style=style)
        return table

    def __str__(self) -> str:
        worst = self.worst
        verdict = "equal to one device" if self.ok else "NOT equal to one device"
        return f"{self.plan}: {verdict}, worst {worst.error:.1e} at {worst.layer} {worst.tensor}"


def check(
    model: nn.Module,
    example: tuple[Any, Any],
    plan: Plan | str,
    loss: Loss,
    *,
    tolerance: float = TOLERANCE,
    show: bool = True,
) -> CheckReport:
    """Run one step split and unsplit in float64, compare loss, gradients and statistics, and print them.

    Alone in its process it starts as many local ranks as the plan needs; inside a job every rank must call
    it. The model is copied and stays as it is.

    Args:
        model: the model.
        example: inputs and targets of one mini-batch, `(x, y)`.
        plan: how to split it.
        loss: a callable `(output, target) -> scalar`.
        tolerance: what counts as equal.
        show: whether to print the table.
    """
    parsed = Plan.parse(plan)
    if parsed.ranks > 1 and is_alone():
        report: CheckReport = on_ranks(parsed.ranks, compare, model, example, parsed, loss, tolerance)
        speaks = True
    else:
        report, speaks = _compare(model, example, parsed, loss, tolerance)
    if show and speaks:
        console = Console(soft_wrap=True)
        console.print(report.table())
        console.print(str(report), highlight=False)
        for note in report.notes:
            console.print(f"note: {note}", highlight=False)
    return report


def compare(
    model: nn.Module, example: tuple[Any, Any], plan: Plan, loss: Loss, tolerance: float
) -> CheckReport:
    """Make the report on the ranks of a job."""
    return _compare(model, example, plan, loss, tolerance)[0]


def _compare(
    model: nn.Module, example: tuple[Any, Any], plan: Plan, loss: Loss, tolerance: float
) -> tuple[CheckReport, bool]:
    x, y = transform(example, _double)
    split, whole = (copy.deepcopy(model).double().train(model.training) for _ in range(2))
    measure = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    notes = _without_dropout(split) and _without_dropout(whole)
    trainer = Trainer(split, (x, y), plan, loss=measure)
    found = trainer.step(x, y)
    wanted = float(unsplit_step(whole, measure, x, y, plan))
    rows = [Deviation("loss", "value", _number(abs(found - wanted) / max(abs(wanted), 1e-12)))]
    grads = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    rows += _deviations(trainer.gradients(), grads, " gradient")
    buffers = {n: b for n, b in whole.state_dict().items() if n in trainer.placement.buffers}
    rows += _deviations(trainer.state_dict(), buffers, "")
    report = CheckReport(str(plan), wanted, tuple(rows), tolerance, notes)
    return report, trainer.fabric.rank == 0


def _deviations(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> list[Deviation]:
    """Compare tensors by name; one that is missing, or holds what is no number, is infinitely far off."""
    filled = {name: tensor.double() for name, tensor in wanted.items() if tensor.numel()}
    largest = max((float(t.abs().max()) for t in filled.values() if bool(t.isfinite().all())), default=0.0)
    rows = []
    for name, tensor in filled.items():
        layer, _, own = name.rpartition(".")
        scale = max(float(tensor.abs().max()), _FLOOR * largest, 1e-300)
        apart = (found[name].double() - tensor).abs().max() / scale if name in found else math.inf
        rows.append(Deviation(layer or "model", own + what, _number(float(apart))))
    return rows


def _number(error: float) -> float:
    """Return an error that can be compared: what is no number is infinite."""
    return math.inf if math.isnan(error) else error


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _without_dropout(model: nn.Module) -> tuple[str, ...]:
    """Switch dropout off: one device draws its masks from another generator."""
    found = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p]
    for module in found:
        module.p = 0.0
    return (f"{len(found)} dropout layers were switched off",) if found else ()


__all__ = ["CheckReport", "Deviation", "check"]
