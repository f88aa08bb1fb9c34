"""One CPU thread for a while, in a program whose own number of threads stays as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """torch runs what the calling thread asks for on one thread; then on as many as before.

    A thread that uses torch for the first time meanwhile begins with one: torch hands on what was
    set last, wherever that was.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
