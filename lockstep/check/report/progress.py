"""Progress callback of a check."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Function called with the name of a stage, its finished parts and the number of its parts."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Show no progress."""
