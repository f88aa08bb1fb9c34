"""Progress of long work: the callback that receives it, and a bar on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

Progress = Callable[[str, int, int], None]
"""Callback with the name of the work, the amount done and the total, in bytes for BYTES."""
BYTES = ("loading", "downloading")
"""Work whose progress is counted in bytes; other work is counted in items."""


def ignore_progress(work: str, done: int, total: int) -> None:
    """Ignore progress."""


class _AmountColumn(ProgressColumn):
    """Column with the amount done and the total."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn()
        self._items = MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        column = self._bytes if task.description in BYTES else self._items
        return column.render(task)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr if that is a terminal; it disappears when done.

    The context value is called with (name, done, total). A KeyboardInterrupt gets a note of the
    work that was running.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        _AmountColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, highlight=False)
    # Log files must not be filled with control sequences.
    off = not console.is_terminal
    with Bar(*columns, console=console, transient=True, disable=off) as bar:
        doing = "starting"
        task = bar.add_task(doing, total=None)

        def show(work: str, done: int, total: int) -> None:
            nonlocal doing
            doing = work
            bar.update(task, description=work, completed=done, total=total)

        try:
            yield show
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"while {doing}")
            raise
