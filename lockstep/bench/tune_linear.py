"""Makes the committed table of linear's tiles: every candidate timed at every weight of the models.

A tile decides the speed and nothing else, so a table may be made again on any machine at any time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from lockstep.errors import ConfigError
from lockstep.kernels.bench_types import ModelShape
from lockstep.kernels.linear import choose_split_k


def tune_linears(
    models: Sequence[ModelShape],
    dtype: torch.dtype,
    path: Path,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> dict[str, dict[int, float]]:
    """Times all tiles and writes the best to `path`, over what stands there or in the committed
    table; key -> first tokens of a bucket -> us of its best tile.

    The file is written after every weight, so what is measured stays where the rest is cut off.
    Raises ConfigError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("tune needs a CUDA device, and none is visible to torch; leave it out.")
    from lockstep.kernels.linear import tuning
    from lockstep.kernels.linear.triton import launch

    table = {**tuning.load_table(), **tuning.load_table(path)}
    arch = "sm" + "".join(map(str, torch.cuda.get_device_capability()))
    shapes = sorted({(n, k) for model in models for _, n, k in model.weights})
    residual = {(n, k) for model in models for _, n, k in model.weights if n == model.hidden}
    times: dict[str, dict[int, float]] = {}
    for done, (n, k) in enumerate(shapes):
        progress(f"{n}x{k}", done, len(shapes))
        weights = tuning.random_weights(n, k, dtype)
        key = f"{arch}/{str(dtype).removeprefix('torch.')}/{n}x{k}"
        run = partial(launch, allow_partials=(n, k) in residual)
        table[key] = {}
        times[key] = {}
        for first, tokens in zip(tuning.BUCKETS, tuning.TIMED, strict=True):
            seconds, tile = tuning.tune(run, tokens, weights, choose_split_k(n, k, "cuda"))[0]
            table[key][first] = tile
            times[key][first] = 1e6 * seconds
        tuning.save_table(table, path)
    return times
