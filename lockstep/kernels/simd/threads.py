"""Thread pool that CPU kernels run on: as many threads as torch uses for an op."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the threads that help a calling thread."""
    return ThreadPoolExecutor(threads, "lockstep-kernel")


# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


def split_range(count: int, run: Callable[[int, int], None]) -> None:
    """Call run(begin, end) on ranges that cover `count` units, each on its own thread.

    run: releases the GIL. Each unit's result depends on that unit alone, so the number of threads
    changes no bit.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        run(0, count)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    pool = _pool(torch.get_num_threads() - 1)
    futures = [pool.submit(run, bounds[i], bounds[i + 1]) for i in range(1, threads)]
    run(bounds[0], bounds[1])
    for future in futures:
        future.result()
