"""The progress of a training run on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Display:
    """Show a bar per epoch and a line when it is over; a display that is off shows nothing."""

    def __init__(self, on: bool, console: Console | None = None) -> None:
        self.on = on
        self.console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        if self.on:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            loss = TextColumn("loss {task.fields[loss]:.4g}")
            # A bar that moves belongs on a terminal; in a file one line per epoch says all.
            shown = self.console.is_terminal
            self._progress = Progress(*columns, loss, console=self.console, transient=True, disable=not shown)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def start(self, title: str, steps: int) -> None:
        """Begin a bar."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(title, total=steps, loss=float("nan"))

    def step(self, loss: float) -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, loss=loss)

    def note(self, text: str) -> None:
        """Print a sentence worth knowing before training begins."""
        if self.on:
            self.console.print(f"note: {text}", highlight=False, soft_wrap=True)

    def epoch(self, number: int, numbers: dict[str, float]) -> None:
        """Print the numbers of an epoch."""
        if self.on:
            parts = [f"{name} {value:.5g}" for name, value in numbers.items()]
            self.console.print(f"epoch {number + 1}: " + "  ".join(parts), highlight=False, soft_wrap=True)
