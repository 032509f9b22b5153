"""A bar for a search that takes longer than one likes to wait for without a word."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

# Quicker searches show nothing.
_PATIENCE_SECONDS = 2.0


class Waiting:
    """Tell how many plans are done with; call it with that number and with that of all plans.

    Args:
        console: where to; default: the terminal behind standard error, nothing if there is none.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._begin = time.monotonic()
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __call__(self, done: int, total: int) -> None:
        """Move the bar; it appears when the search has taken a while."""
        if self._progress is None:
            if not self.console.is_terminal or time.monotonic() - self._begin < _PATIENCE_SECONDS:
                return
            columns = (TextColumn("plans"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task("plans", total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total)
