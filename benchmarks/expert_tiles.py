"""Time of a mixture's experts in us by tile. docs/kernels/experts.md quotes it.

    python benchmarks/expert_tiles.py [--model Qwen3.6-35B-A3B] [--layout int4] [--tokens 1,8,64]

lockstep.kernels.experts.tiles chooses four tiles: up and down, dense and quantized. Every tile of
TILES replaces one of them. Tokens choose experts evenly and independently, different ones in each
of the CALLS calls, so that no weight is in the cache. Prints one JSON line per tile, with whether
its bits equal those of the default tiles; the first line of each number of tokens has the default
tiles.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from lockstep.bench.dimensions import MODELS
from lockstep.bench.measurement import parse_counts, print_json
from lockstep.kernels.backends import load
from lockstep.kernels.bench_types import ModelShape
from lockstep.kernels.experts.tiles import Tile, Tiles, runs_unsorted, tiles_of
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.bench import LAYOUTS
from lockstep.kernels.timing import seconds_per_call

CALLS = 8
"""Calls of a timed chain; each has different experts."""
REPEATS = 6
"""Timed runs of the chain; the fastest one is reported."""
TILES = {
    "plain": (
        Tile(64, 16, 128, 4, 3),
        Tile(64, 16, 128, 4, 4),
        Tile(64, 16, 128, 4, 5),
        Tile(64, 16, 64, 4, 5),
        Tile(64, 16, 64, 4, 8),
        Tile(128, 16, 64, 4, 5),
        Tile(128, 16, 64, 8, 6),
    ),
    "quantized": (
        Tile(64, 16, 256, 4, 3),
        Tile(64, 16, 256, 4, 2),
        Tile(64, 16, 128, 4, 3),
        Tile(64, 16, 128, 4, 4),
        Tile(128, 16, 128, 4, 3),
        Tile(128, 16, 128, 4, 4),
        Tile(128, 16, 256, 4, 3),
        Tile(128, 16, 256, 8, 3),
    ),
}
"""Candidates with blocks of 16 tokens. They take the token count of the default tile if it is
larger."""


def main() -> None:
    """Time all tiles on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    mixtures = [name for name, model in MODELS.items() if model.moe]
    parser.add_argument("--model", default="Qwen3.6-35B-A3B", choices=mixtures)
    parser.add_argument(
        "--layout", default="", choices=["", *LAYOUTS], help="format of quantized weights"
    )
    parser.add_argument("--tokens", type=parse_counts, default="1,8,64", help="tokens of a step")
    args = parser.parse_args()
    load()
    with torch.inference_mode():
        for tokens in args.tokens:
            for line in lines(MODELS[args.model], args.layout, tokens):
                print_json(line)


def lines(model: ModelShape, layout: str, tokens: int) -> Iterator[dict[str, object]]:
    """Yield the figures of one number of tokens, one per tile."""
    from lockstep.kernels.experts.triton import launch_sorted, launch_unsorted

    assert model.moe is not None, "the model has experts"
    (count, top_k, inner) = (model.moe.experts, model.moe.top_k, model.moe.inner)
    up = weight(layout, count, inner * (1 + model.gated), model.hidden)
    down = weight(layout, count, model.hidden, inner)
    x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device="cuda")
    choices = [torch.rand(tokens, count, device="cuda").topk(top_k) for _ in range(CALLS)]
    routed = [(ids.int(), weights.bfloat16()) for weights, ids in choices]
    unsorted = runs_unsorted(tokens, top_k, count, bool(layout))
    launch = launch_unsorted if unsorted else launch_sorted
    defaults = tiles_of(tokens * top_k, count, torch.bfloat16, unsorted)
    expected = launch(x, up, down, *routed[0], None, None, defaults, model.gated)
    for name, tiles in candidates(defaults, bool(layout)):

        def run(ids: Tensor, weights: Tensor, tiles: Tiles = tiles) -> Tensor:
            return launch(x, up, down, ids, weights, None, None, tiles, model.gated)

        same = bool((run(*routed[0]) == expected).all())
        calls = [lambda pair=pair, run=run: run(*pair) for pair in routed]
        us = 1e6 * seconds_per_call(calls, "cuda", REPEATS, pick=min)
        tile = asdict(getattr(tiles, name)) if name else None
        yield dict(tokens=tokens, of=name, us=round(us, 2), same=same, tile=tile)


def weight(layout: str, count: int, n: int, k: int) -> Tensor | QuantizedWeight:
    """Return random weights [count, n, k] of all experts."""
    if not layout:
        weights = torch.empty(count, n, k, dtype=torch.bfloat16, device="cuda")
        return weights.normal_(0.0, k**-0.5)
    quantized = LAYOUTS[layout](count * n, k, "cuda")
    quantized.fill_dummy(torch.Generator("cuda").manual_seed(0))
    return quantized


def candidates(defaults: Tiles, quantized: bool) -> Iterator[tuple[str, Tiles]]:
    """Yield (name of the replaced tile, tiles), the default tiles first."""
    yield "", defaults
    names = ("quantized_up", "quantized_down") if quantized else ("up", "down")
    for name in names:
        for tile in TILES["quantized" if quantized else "plain"]:
            num_tokens = defaults.up.tokens
            other = Tile(tile.rows, num_tokens, tile.k, tile.warps, tile.stages)
            yield name, defaults._replace(**{name: other})


if __name__ == "__main__":
    main()
