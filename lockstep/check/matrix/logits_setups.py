"""Engines and batches of the logits check: drafts, graph modes, numbers of rows, chunk sizes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from lockstep.check import oracle_drafter
from lockstep.check.drafters import NO_DRAFTER, speculative_config
from lockstep.check.matrix.cases import PREFIX_TAIL, Batch, Case, cyclic_slice
from lockstep.check.matrix.setups import CPU_LONG_PROMPT, LOGITS, PREFIX_HIT, Setup
from lockstep.sampling_params import SamplingParams
from lockstep.spec.config import AUTO_DRAFTS
from lockstep.step import PAGE_SIZE

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Chunk sizes: maximum prompt tokens of a step."""
SHORT_LENGTHS = (
    5,
    17,
    63,
    64,
    65,
    72,
    80,
    90,
    100,
    110,
    127,
    128,
    129,
    140,
    150,
    160,
    191,
    192,
    230,
)
"""Lengths of the short prompts: at multiples of a page of 64 tokens, next to them, and between."""
LONG_LENGTH = 8192 + 70
"""Length of the long prompt, if the model's context allows it."""
CPU_LONG_LENGTH = 2048 + 70
"""Maximum length of the long prompt on a CPU, whose kernels have no other code for longer ones."""
NUM_PREFIX_HITS = 7
"""Number of cases in the prefix-hit batch."""
NUM_SNAPSHOTS = 16


@dataclass(frozen=True)
class Size:
    """Size of the logits check.

    num_rows: batch sizes. drafts: each K in the first graph mode. other_mode_drafts: each K in the
    other graph modes. chunks: number of chunk sizes per engine. alone: prompts per engine that run
    alone. long: maximum length of the long prompt. max_tokens: output tokens per request. cpu_long:
    maximum length of the long prompt on a CPU.
    """

    num_rows: tuple[int, ...]
    drafts: tuple[int, ...]
    other_mode_drafts: tuple[int, ...]
    chunks: int
    alone: int
    long: int
    max_tokens: int
    cpu_long: int = CPU_LONG_LENGTH


SIZES = {
    # CPU kernels run a prompt of 1,100 tokens by the code that runs CPU_LONG_PROMPT.
    "quick": Size((1, 2, 7, 16), (0, 3, 7), (3,), 1, 2, 1100, 12, CPU_LONG_PROMPT),
    "default": Size((1, 2, 7, 16, 64), (0, 3, 15), (3,), 3, 2, LONG_LENGTH, 16),
    "full": Size((1, 2, 7, 16, 64), (*range(8), 15), (0, 3, 15), 2, 3, LONG_LENGTH, 16),
}


def long_length(size: Size, device: str, max_context: int) -> int:
    """Return the length of the long prompt on a device, for a model of this context."""
    longest = min(size.long, size.cpu_long) if device == "cpu" else size.long
    return min(longest, max_context - size.max_tokens)


def make_cases(vocab: int, long: int, max_tokens: int) -> list[Case]:
    """Return 20 prompts of random token ids, alternately greedy and sampled; the last is long."""
    rng = random.Random(20)
    cases = []
    for index, length in enumerate((*SHORT_LENGTHS, long)):
        temperature = 0.8 * (index % 2)
        params = SamplingParams(
            temperature=temperature,
            seed=index,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        prompt = tuple(rng.choices(range(vocab), k=length))
        name = f"prompt of {length:,} tokens"
        cases.append(Case(name, "sampled" if temperature else "greedy", prompt, params))
    return cases


def engines(
    size: Size, graphs: tuple[str, ...], own_drafter: str | None, own_drafts: int = AUTO_DRAFTS
) -> Iterator[Setup]:
    """Yield every K of the size in the first graph mode, some in the others.

    own_drafter: drafter in the checkpoint, which one more engine uses, or None. own_drafts: its K.
    """
    for graph in graphs:
        for k in size.drafts if graph == graphs[0] else size.other_mode_drafts:
            yield Setup(oracle_drafter.NAME if k else NO_DRAFTER, k, LOGITS, graph)
    if own_drafter:
        yield Setup(own_drafter, own_drafts, LOGITS, graphs[0])


def settings(setup: Setup, size: Size, long: int) -> dict[str, Any]:
    """Return the LLM arguments of an engine that fits all rows and two long prompts."""
    num_rows = max(size.num_rows)
    length = long + size.max_tokens
    short = max(SHORT_LENGTHS) + size.max_tokens + 3 * (setup.k + 1)
    return {
        "speculative_config": speculative_config(setup.drafter, setup.k),
        "cuda_graph_mode": setup.graph,
        "max_num_seqs": num_rows,
        "row_buckets": tuple(b for b in (1, 2, 8, 16) if b <= num_rows),
        "max_model_len": length,
        "max_num_batched_tokens": max(CHUNKS),
        "num_gpu_blocks": 2 * num_rows * -(-short // PAGE_SIZE) + 2 * (length // PAGE_SIZE + 2),
        "num_snapshots": NUM_SNAPSHOTS,
    }


def batches(cases: list[Case], size: Size, engine_index: int) -> Iterator[Batch]:
    """Yield the batches of an engine; `engine_index` selects single prompts and chunk sizes."""
    *short, long = cases
    max_chunk = max(CHUNKS)
    for num_rows in size.num_rows:
        if num_rows == 1:
            yield from (
                Batch("1 row", (c,), max_chunk)
                for c in cyclic_slice(short, size.alone, engine_index)
            )
        else:
            yield Batch(f"{num_rows} rows", tuple(islice(cycle(short), num_rows)), max_chunk)
    for chunk in cyclic_slice(CHUNKS, size.chunks, engine_index):
        if chunk <= max(CHUNKS[0], len(long.prompt)):
            yield Batch(f"chunks of {chunk}", (long, *cyclic_slice(short, 3, engine_index)), chunk)
    long_enough = [case for case in short if len(case.prompt) > PAGE_SIZE + PREFIX_TAIL]
    yield Batch(
        PREFIX_HIT,
        tuple(cyclic_slice(long_enough, NUM_PREFIX_HITS, engine_index)),
        max_chunk,
        warm_prefixes=True,
    )
