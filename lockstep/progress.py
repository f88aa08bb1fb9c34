"""How far work has come, as a bar on a terminal."""

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
"""Called with what is done, how much of it, and of how much."""
BYTES = ("loading", "downloading")
"""Work whose progress is counted in bytes; that of all other is counted in things."""


class _Amount(ProgressColumn):
    """How much is done, of how much."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn()
        self._things = MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        column = self._bytes if task.description in BYTES else self._things
        return column.render(task)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr where that is a terminal, driven by (what, done, of); it goes when done.

    A KeyboardInterrupt leaves with a note of what was being done.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        _Amount(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, highlight=False)
    off = not console.is_terminal
    with Bar(*columns, console=console, transient=True, disable=off) as bar:
        doing = "starting"
        task = bar.add_task(doing, total=None)

        def show(what: str, done: int, of: int) -> None:
            nonlocal doing
            doing = what
            bar.update(task, description=what, completed=done, total=of)

        try:
            yield show
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"while {doing}")
            raise
