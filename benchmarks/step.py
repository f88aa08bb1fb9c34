"""ms of one captured step, by rows: what benchmarks/RESULTS.md quotes.

    python benchmarks/step.py FOLDER --rows 1,8,64 --k 3 --context 4096 [--prompt 8192] [--kernels]
    python benchmarks/step.py FOLDER --k 3 --drafter eagle3 --draft-model HEAD --halves

FOLDER holds a config.json; weights are random, and so are the keys and values of the context. Every
row stands at the context and brings 1 + K tokens; K drafts are made behind them. Nothing is
scheduled: the step is replayed REPLAYS times in a row; the mean is printed, one JSON line each.
--kernels adds where the time of a step goes: launches and us of each kernel. --halves adds the ms
of a step's second half, which samples, accepts and drafts, replayed by itself.
"""

import argparse
import json

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.config import EngineConfig
from lockstep.step import PAGE_SIZE, StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import NO_HOOKS
from lockstep.worker.rows import write_place
from lockstep.worker.startup import EngineParts, build_engine
from lockstep.worker.step_timer import StepTimer

NAME = 80
"""Characters of a kernel's name that are printed."""
WARM = 4
"""Untimed steps in front of the timed ones."""
REPLAYS = 30
"""Timed steps, of which the mean is printed."""
PROFILED = 3
"""Steps whose kernels are counted."""
PROMPTS = 3
"""Timed prompts, of which the least is printed, behind one that does not count."""
AHEAD = 64
"""Tokens in front of the context at which rows begin, so that accepted drafts lead up to it."""


def main() -> None:
    """Reads the arguments, builds the engine once, and times every number of rows."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("model")
    ask.add_argument("--rows", default="1,8,64", help="numbers of rows, one captured step each")
    ask.add_argument("--k", type=int, default=0, help="drafts verified and made in a step")
    ask.add_argument("--drafter", default="mtp", help="the method that drafts")
    ask.add_argument("--draft-model", default=None, help="folder of the drafter's own config.json")
    ask.add_argument("--halves", action="store_true", help="ms of the half that drafts, too")
    ask.add_argument("--context", type=int, default=4096, help="tokens in front of every row")
    ask.add_argument("--kv-cache-dtype", default="auto", help="format of keys and values")
    ask.add_argument("--prompt", type=int, default=0, help="time one prompt of so many tokens, too")
    ask.add_argument("--kernels", action="store_true", help="launches and us of each kernel")
    given = ask.parse_args()
    rows = tuple(sorted(int(count) for count in given.rows.split(",")))
    length = max(given.context + 8 * PAGE_SIZE, given.prompt + PAGE_SIZE)
    pages = -(-length // PAGE_SIZE)
    spec = {"method": given.drafter, "num_speculative_tokens": given.k, "adaptive": False}
    if given.draft_model:
        spec["model"] = given.draft_model
    config = EngineConfig.read(
        model=given.model,
        load_format="dummy",
        max_model_len=length,
        max_num_seqs=rows[-1],
        row_buckets=rows,
        max_num_batched_tokens=max(2048, given.prompt),
        num_gpu_blocks=rows[-1] * pages + 2,
        num_snapshots=0,
        kv_cache_dtype=given.kv_cache_dtype,
        speculative_config=spec if given.k else None,
    )
    built = build_engine(config, lambda *_: None, NO_HOOKS)
    with torch.inference_mode():
        for cache in worker_of(built).paged:
            fill_cache(cache)
        for count in rows:
            place(built, count, given.context - AHEAD, pages)
            worker_of(built).table.inputs.fill(row_ids=list(range(1, count + 1)))
            ms = timed(built, StepShape.uniform(count, given.k + 1), WARM, REPLAYS)
            line = {"rows": count, "k": given.k, "context": given.context, "ms": ms}
            if given.kv_cache_dtype != "auto":
                line["kv"] = given.kv_cache_dtype
            if given.halves:
                line["decide_ms"] = decide_ms(built, StepShape.uniform(count, given.k + 1))
            if given.kernels:
                line["kernels"] = kernels(built, StepShape.uniform(count, given.k + 1))
            print(json.dumps(line), flush=True)
        if given.prompt:
            line = {"prompt": given.prompt, "ms": prompt_ms(built, given.prompt, pages)}
            if given.kernels:
                place_prompt(built, given.prompt, pages)
                line["kernels"] = kernels(built, prompt_shape(given.prompt), 1)
            print(json.dumps(line), flush=True)


def fill_cache(cache: Tensor) -> None:
    """Random keys and values, or random bytes where they are packed."""
    if cache.dtype in (torch.bfloat16, torch.float16, torch.float32):
        cache.normal_()
    else:
        cache.view(torch.uint8).random_(0, 256)


def place(built: EngineParts, rows: int, computed: int, pages: int) -> None:
    """Rows 1 .. `rows` of the table with this many tokens computed, each on pages of its own."""
    table = worker_of(built).table
    for row in range(1, rows + 1):
        table.tokens[row].random_(0, 1000)
        table.computed[row] = computed
        table.prompt_len[row] = 1
        table.folded[row] = computed
        first = 1 + (row - 1) * pages
        own = list(range(first, first + pages))
        write_place(table, row, own, row if worker_of(built).state else 0)


def timed(built: EngineParts, shape: StepShape, warm: int, times: int) -> float:
    """Mean ms of `times` steps behind `warm` others."""
    for _ in range(warm):
        worker_of(built).run_step(shape)
    timer = StepTimer(built.plan.device)
    for _ in range(times):
        worker_of(built).run_step(shape)
    timer.end()
    timer.wait()
    return round(timer.ms / times, 3)


def decide_ms(built: EngineParts, shape: StepShape) -> float:
    """Mean ms of the second half of a step, on what one first half has left."""
    forward, decide = worker_of(built).run_step
    forwarded = forward(shape)
    for _ in range(WARM):
        decide(forwarded)
    timer = StepTimer(built.plan.device)
    for _ in range(REPLAYS):
        decide(forwarded)
    timer.end()
    timer.wait()
    return round(timer.ms / REPLAYS, 4)


def kernels(
    built: EngineParts, shape: StepShape, times: int = PROFILED
) -> list[tuple[str, float, float]]:
    """Of each kernel of a step, its name, launches and us in all; the dearest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            worker_of(built).run_step(shape)
        torch.cuda.synchronize()
    found = [
        (event.key[:NAME], event.count / times, round(event.device_time_total / times, 1))
        for event in seen.key_averages()
        if event.device_time_total
    ]
    return sorted(found, key=lambda kernel: -kernel[2])


def prompt_shape(tokens: int) -> StepShape:
    """A step that computes one prompt whole."""
    return StepShape(1, tokens, tokens, prompt=True)


def place_prompt(built: EngineParts, tokens: int, pages: int) -> None:
    """The one row of a prompt that begins at its first token."""
    place(built, 1, 0, pages)
    worker_of(built).table.inputs.fill(row_ids=[1], query_lens=[tokens])


def prompt_ms(built: EngineParts, tokens: int, pages: int) -> float:
    """The least ms of a few prompts of one row, whole, from nothing."""
    shape = prompt_shape(tokens)
    found = []
    for _ in range(1 + PROMPTS):
        place_prompt(built, tokens, pages)
        found.append(timed(built, shape, 0, 1))
    return min(found[1:])


if __name__ == "__main__":
    main()
