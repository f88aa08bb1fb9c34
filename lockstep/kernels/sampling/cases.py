"""Test cases of sample: each parameter alone, all together, ties, invalid logits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.sampling import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    FILTERS,
    MIN_TOKENS,
    NOISE,
    PENALTIES,
    SamplingState,
)

ALL = BIAS | PENALTIES | MIN_TOKENS | BAD_WORDS | FILTERS | NOISE | ALLOWED
ROW_FLAGS = (
    0,
    BIAS,
    PENALTIES,
    MIN_TOKENS,
    BAD_WORDS,
    NOISE,
    NOISE | FILTERS,
    PENALTIES | NOISE,
    ALLOWED,
    NOISE | ALLOWED,
    NOISE | FILTERS | ALLOWED,
    ALL,
    ALL,
    NOISE | FILTERS,
)
"""Flags of rows 1.. of the table; row 0 is the null row."""


def random_rows(vocab: int, seed: int = 0) -> SamplingState:
    """Return a row for each of ROW_FLAGS, with values for every parameter."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(ROW_FLAGS) + 1
    state = SamplingState.empty(rows, vocab, 16, (3, 8), "cpu")
    state.flags[1:] = torch.tensor(ROW_FLAGS, dtype=torch.int32)
    state.temperature[1:] = torch.linspace(0.3, 1.5, rows - 1)
    state.min_p[1:] = 0.01
    state.top_p[1:] = 0.8
    state.top_k[1:] = torch.arange(3, rows + 2)
    state.min_p[-2] = 0.0
    state.top_p[-3] = 1.0
    state.top_k[-4] = 0
    state.min_p[-1] = 0.0
    state.top_k[-1] = 0
    state.repetition[1:] = 1.3
    state.presence[1:] = 0.4
    state.frequency[1:] = 0.2
    state.seed[1:] = torch.randint(-(2**62), 2**62, (rows - 1,), generator=generator)
    state.bias[1:] = torch.randn(rows - 1, vocab, generator=generator)
    state.bias[1:, 5:9] = -torch.inf
    state.counts[1:] = torch.randint(0, 3, (rows - 1, vocab), generator=generator).int()
    state.in_prompt[1:] = torch.rand(rows - 1, vocab, generator=generator) < 0.3
    state.min_position[1:] = 9
    state.stop_ids[1:, :3] = torch.tensor([1, 2, vocab - 1])
    return state


def batch(vocab: int, queries: int, seed: int = 0) -> dict[str, Any]:
    """Return arguments of sample: every row once, in random order, including the null row."""
    generator = torch.Generator().manual_seed(seed)
    state = random_rows(vocab, seed)
    rows = state.flags.shape[0]
    history = torch.randint(0, vocab, (rows, 40), generator=generator)
    positions = torch.randint(8, 12, (rows, 1), generator=generator) + torch.arange(queries)
    logits = torch.randn(rows, queries, vocab, generator=generator).to(torch.bfloat16).float()
    for row in range(1, rows):  # a word whose prefix is in the history, a word of one token
        at = int(positions[row, 0])
        state.bad_words[row, 0, -3:-1] = history[row, at - 2 : at]
        state.bad_words[row, 1, -1] = 3
        state.bad_words[row, 0, -1] = int(logits[row, 0].argmax())
    words = (rows, queries, -(-vocab // 32))
    allowed = torch.randint(-(2**31), 2**31, words, generator=generator).int()
    order = torch.randperm(rows, generator=generator)
    drafts = torch.randint(-1, vocab, (rows, queries - 1), generator=generator)
    return dict(
        logits=logits[order],
        positions=positions[order],
        drafts=drafts[order],
        row_ids=order,
        history=history,
        state=state,
        allowed=allowed[order],
    )


def sample_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of sample; logits are fp32 for every dtype."""
    for queries in (1, 4):
        yield f"vocab 100, Q={queries}", batch(100, queries, seed=queries)
    yield "100 tokens of 200", among(batch(200, 1), 100)
    yield "vocab 100, Q=16", batch(100, 16, seed=16)
    yield "no mask", {**batch(100, 2), "allowed": None}
    yield "vocab 5000, Q=3", batch(5000, 3, seed=3)
    yield "4200 tokens of 9000", among(batch(9000, 1, seed=1), 4200)
    for vocab, queries in ((100, 2), (5000, 8)):
        yield f"faulty, vocab {vocab}", faulty(batch(vocab, queries, seed=vocab))
    yield "faulty, 100 tokens of 200", among(faulty(batch(200, 3)), 100)


FAULTS: dict[str, tuple[slice | int, float, bool]] = {
    "one NaN": (3, torch.nan, False),
    "a NaN that is banned": (6, torch.nan, False),
    "all NaN": (slice(None), torch.nan, False),
    "an infinity": (-1, torch.inf, False),
    "an infinity that is banned": (7, torch.inf, False),
    "all of one infinity": (slice(None), torch.inf, False),
    "nothing left": (slice(None), -torch.inf, False),
    "one left": (slice(9, None), -torch.inf, True),
}
"""(indices, value, whether the logit row still has a token) of each kind of invalid logits."""


def faulty(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with one of FAULTS in every other logit row."""
    logits = arguments["logits"].clone()
    rows, queries, _ = logits.shape
    for index in range(0, rows * queries, 2):
        where, value, _ = list(FAULTS.values())[index // 2 % len(FAULTS)]
        logits[index // queries, index % queries, where] = value
    return {**arguments, "logits": logits}


def among(arguments: dict[str, Any], kept: int) -> dict[str, Any]:
    """Return the batch with the logits of `kept` random tokens only, the last token included."""
    vocab = arguments["logits"].shape[-1]
    generator = torch.Generator().manual_seed(kept)
    kept_ids = torch.randperm(vocab - 1, generator=generator)[: kept - 1]
    ids = torch.cat([kept_ids, torch.tensor([vocab - 1])]).sort().values
    return {**arguments, "logits": arguments["logits"][..., ids].contiguous(), "ids": ids}


def sample_traits(logits: Tensor, **rest: Any) -> dict[str, Any]:
    """Return the traits with which the sampler chooses a backend."""
    return dict(vocab=logits.shape[-1])
