"""Engines and batches of the logits check: drafts, graph modes, numbers of rows, chunk sizes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from lockstep.check import oracle_drafter
from lockstep.check.drafters import NONE, speculative_config
from lockstep.check.matrix.cases import PREFIX_TAIL, Batch, Case, in_turn
from lockstep.check.matrix.setups import COLD, PREFIX_HIT, Setup
from lockstep.sampling_params import SamplingParams
from lockstep.step import PAGE_SIZE

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Chunk sizes: maximum prompt tokens of a step."""
SHORT = (5, 17, 63, 64, 65, 72, 80, 90, 100, 110, 127, 128, 129, 140, 150, 160, 191, 192, 230)
"""Lengths of the short prompts, on the grid of 64 tokens and off it."""
LONG = 8192 + 70
"""Length of the long prompt, if the model's context allows it."""
HITS = 7
"""Number of cases in the prefix-hit batch."""
SNAPSHOTS = 16
OWN_DRAFTS = 3
"""K of the drafter in the checkpoint."""


@dataclass(frozen=True)
class Size:
    """Size of the logits check.

    rows: numbers of rows. drafts: K in the first graph mode. mixed: K in the other graph modes.
    chunks: chunk sizes per engine. alone: prompts per engine that run alone. long: maximum length
    of the long prompt.
    """

    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    mixed: tuple[int, ...]
    chunks: int
    alone: int
    long: int
    max_tokens: int


SIZES = {
    "quick": Size((1, 2, 7, 16), (0, 3, 7), (3,), 1, 2, 1100, 12),
    "default": Size((1, 2, 7, 16, 64), (0, 3, 15), (3,), 3, 2, LONG, 16),
    "full": Size((1, 2, 7, 16, 64), (*range(8), 15), (0, 3, 15), 2, 3, LONG, 16),
}


def make_cases(vocab: int, long: int, max_tokens: int) -> list[Case]:
    """Return 20 prompts of random token ids, alternately greedy and sampled; the last is long."""
    rng = random.Random(20)
    cases = []
    for index, length in enumerate((*SHORT, long)):
        heat = 0.8 * (index % 2)
        params = SamplingParams(
            temperature=heat, seed=index, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        prompt = tuple(rng.choices(range(vocab), k=length))
        name = f"prompt of {length:,} tokens"
        cases.append(Case(name, "sampled" if heat else "greedy", prompt, params))
    return cases


def engines(size: Size, graphs: tuple[str, ...], own: str | None) -> Iterator[Setup]:
    """Yield every K of the size in the first graph mode, some in the others.

    own: drafter in the checkpoint, or None; one engine uses it.
    """
    for graph in graphs:
        for k in size.drafts if graph == graphs[0] else size.mixed:
            yield Setup(oracle_drafter.NAME if k else NONE, k, COLD, graph)
    if own:
        yield Setup(own, OWN_DRAFTS, COLD, graphs[0])


def settings(setup: Setup, size: Size, long: int) -> dict[str, Any]:
    """Return the LLM arguments of an engine that fits all rows and two long prompts."""
    rows = max(size.rows)
    length = long + size.max_tokens
    short = max(SHORT) + size.max_tokens + 3 * (setup.k + 1)
    return {
        "speculative_config": speculative_config(setup.drafter, setup.k),
        "cuda_graph_mode": setup.graph,
        "max_num_seqs": rows,
        "row_buckets": tuple(b for b in (1, 2, 8, 16) if b <= rows),
        "max_model_len": length,
        "max_num_batched_tokens": max(CHUNKS),
        "num_gpu_blocks": 2 * rows * -(-short // PAGE_SIZE) + 2 * (length // PAGE_SIZE + 2),
        "num_snapshots": SNAPSHOTS,
    }


def batches(cases: list[Case], size: Size, turn: int) -> Iterator[Batch]:
    """Yield the batches of engine number `turn`, which selects single prompts and chunk sizes."""
    *short, long = cases
    most = max(CHUNKS)
    for rows in size.rows:
        if rows == 1:
            yield from (Batch("1 row", (c,), most) for c in in_turn(short, size.alone, turn))
        else:
            yield Batch(f"{rows} rows", tuple(islice(cycle(short), rows)), most)
    for chunk in in_turn(CHUNKS, size.chunks, turn):
        if chunk <= max(CHUNKS[0], len(long.prompt)):
            yield Batch(f"chunks of {chunk}", (long, *in_turn(short, 3, turn)), chunk)
    hits = [case for case in short if len(case.prompt) > PAGE_SIZE + PREFIX_TAIL]
    yield Batch(PREFIX_HIT, tuple(in_turn(hits, HITS, turn)), most, warm_prefixes=True)
