"""Temporary restriction of torch to one CPU thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body's torch operations on one thread, then restore the number of threads."""
    # A thread that uses torch for the first time inside the body starts with one thread too: torch
    # initialises new threads with the last number set, by any thread.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
