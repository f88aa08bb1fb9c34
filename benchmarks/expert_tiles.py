"""us of a mixture's experts by tile: what docs/kernels/experts.md quotes.

    python benchmarks/expert_tiles.py [--model Qwen3.6-35B-A3B] [--layout int4] [--tokens 1,8,64]

Every tile of TILES takes the place of one of the four that lockstep.kernels.experts.tiles chooses:
that of up or of down, dense or quantized. Tokens choose their experts evenly and independently,
others in each of CALLS calls, so that no weight is in the cache. One JSON line each, with whether
the bits were those of the tiles chosen; the first of each number of tokens is those.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from lockstep.bench.dimensions import MODELS
from lockstep.kernels.backends import load
from lockstep.kernels.bench_types import ModelShape
from lockstep.kernels.experts.tiles import Tile, Tiles, runs_unsorted, tiles_of
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.bench import LAYOUTS
from lockstep.kernels.timing import seconds_per_call

CALLS = 8
"""Calls of a chain, each with experts of its own."""
REPEATS = 6
"""Runs of it, of which the fastest counts."""
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
    "packed": (
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
"""Blocks of 16 tokens; where the chosen ones hold more, theirs do, too."""


def main() -> None:
    """Times them on a GPU."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    mixtures = [name for name, model in MODELS.items() if model.moe]
    ask.add_argument("--model", default="Qwen3.6-35B-A3B", choices=mixtures)
    ask.add_argument("--layout", default="", choices=["", *LAYOUTS], help="of packed weights")
    ask.add_argument("--tokens", default="1,8,64", help="of a step")
    given = ask.parse_args()
    load()
    with torch.inference_mode():
        for tokens in given.tokens.split(","):
            for line in lines(MODELS[given.model], given.layout, int(tokens)):
                print(json.dumps(line), flush=True)


def lines(model: ModelShape, layout: str, tokens: int) -> Iterator[dict[str, object]]:
    """What is printed for a number of tokens."""
    from lockstep.kernels.experts.triton import launch_sorted, launch_unsorted

    assert model.moe is not None, "the model has experts"
    (count, top_k, inner) = (model.moe.experts, model.moe.top_k, model.moe.inner)
    up = weight(layout, count, inner * (1 + model.gated), model.hidden)
    down = weight(layout, count, model.hidden, inner)
    x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device="cuda")
    shares = [torch.rand(tokens, count, device="cuda").topk(top_k) for _ in range(CALLS)]
    sent = [(chosen.int(), share.bfloat16()) for share, chosen in shares]
    unsorted = runs_unsorted(tokens, top_k, count, bool(layout))
    launch = launch_unsorted if unsorted else launch_sorted
    usual = tiles_of(tokens * top_k, count, torch.bfloat16, unsorted)
    wanted = launch(x, up, down, *sent[0], None, None, usual, model.gated)
    for name, tiles in tried(usual, bool(layout)):

        def run(ids: Tensor, share: Tensor, tiles: Tiles = tiles) -> Tensor:
            return launch(x, up, down, ids, share, None, None, tiles, model.gated)

        same = bool((run(*sent[0]) == wanted).all())
        calls = [lambda pair=pair, run=run: run(*pair) for pair in sent]
        us = 1e6 * seconds_per_call(calls, "cuda", REPEATS, pick=min)
        tile = asdict(getattr(tiles, name)) if name else None
        yield dict(tokens=tokens, of=name, us=round(us, 2), same=same, tile=tile)


def weight(layout: str, count: int, n: int, k: int) -> Tensor | QuantizedWeight:
    """Weights [n, k] of all experts."""
    if not layout:
        found = torch.empty(count, n, k, dtype=torch.bfloat16, device="cuda")
        return found.normal_(0.0, k**-0.5)
    packed = LAYOUTS[layout](count * n, k, "cuda")
    packed.fill_dummy(torch.Generator("cuda").manual_seed(0))
    return packed


def tried(usual: Tiles, packed: bool) -> Iterator[tuple[str, Tiles]]:
    """(what differs, tiles): none, then one after another."""
    yield "", usual
    names = ("quantized_up", "quantized_down") if packed else ("up", "down")
    for name in names:
        for tile in TILES["packed" if packed else "plain"]:
            held = usual.up.tokens
            other = Tile(tile.rows, held, tile.k, tile.warps, tile.stages)
            yield name, usual._replace(**{name: other})


if __name__ == "__main__":
    main()
