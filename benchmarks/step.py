"""Time of one captured step in ms, by rows. benchmarks/RESULTS.md quotes it.

    python benchmarks/step.py FOLDER --rows 1,8,64 --k 3 --context 4096 [--prompt 8192] [--kernels]
    python benchmarks/step.py FOLDER --k 3 --drafter eagle3 --draft-model HEAD --halves

FOLDER contains a config.json; weights are random, and so are the keys and values of the context.
Each row has --context tokens in the cache, computes 1 + K tokens and proposes K drafts. The
scheduler does not run: the step is replayed REPLAYS times, and the mean is printed, one JSON line
per number of rows. --kernels adds the launches and us of each kernel. --halves adds the ms of the
second half of a step alone, which samples, accepts and drafts.
"""

import argparse

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.bench.measurement import model_settings, parse_counts, print_json, speculative_config
from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine_builder import build_engine
from lockstep.step import PAGE_SIZE, StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.rows import write_place
from lockstep.worker.step_timer import StepTimer

NAME = 80
"""Characters of a kernel's name in the output."""
WARM = 4
"""Untimed steps before the timed ones."""
REPLAYS = 30
"""Timed steps; their mean is printed."""
PROFILED = 3
"""Steps in the kernel profile."""
PROMPTS = 3
"""Timed prompts after an untimed one; the fastest is printed."""
AHEAD = 64
"""Tokens between the first position of a row and --context, so that accepted drafts reach it."""


def main() -> None:
    """Read the arguments, build the engine once, and time every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument(
        "--rows",
        type=parse_counts,
        default="1,8,64",
        help="numbers of rows, one captured step each",
    )
    parser.add_argument("--k", type=int, default=0, help="drafts of a step")
    parser.add_argument("--drafter", default="mtp", help="drafting method")
    parser.add_argument(
        "--draft-model", default=None, help="folder of the drafter's own config.json"
    )
    parser.add_argument("--halves", action="store_true", help="add the ms of the half that drafts")
    parser.add_argument("--context", type=int, default=4096, help="cached tokens of every row")
    parser.add_argument("--kv-cache-dtype", default="auto", help="format of keys and values")
    parser.add_argument("--prompt", type=int, default=0, help="also time one prompt of this length")
    parser.add_argument("--kernels", action="store_true", help="add launches and us of each kernel")
    args = parser.parse_args()
    rows = tuple(sorted(args.rows))
    length = max(args.context + 8 * PAGE_SIZE, args.prompt + PAGE_SIZE)
    pages = -(-length // PAGE_SIZE)
    draft_model = {"model": args.draft_model} if args.draft_model else {}
    config = EngineConfig.read(
        **model_settings(args.model),
        max_model_len=length,
        max_num_seqs=rows[-1],
        row_buckets=rows,
        max_num_batched_tokens=max(2048, args.prompt),
        num_gpu_blocks=rows[-1] * pages + 2,
        num_snapshots=0,
        kv_cache_dtype=args.kv_cache_dtype,
        speculative_config=speculative_config(args.drafter, args.k, **draft_model),
    )
    engine = build_engine(config)
    with torch.inference_mode():
        for cache in worker_of(engine).paged:
            fill_cache(cache)
        for count in rows:
            set_rows(engine, count, args.context - AHEAD, pages)
            worker_of(engine).table.inputs.fill(row_ids=list(range(1, count + 1)))
            ms = timed(engine, StepShape.uniform(count, args.k + 1), WARM, REPLAYS)
            line = {"rows": count, "k": args.k, "context": args.context, "ms": ms}
            if args.kv_cache_dtype != "auto":
                line["kv"] = args.kv_cache_dtype
            if args.halves:
                line["decide_ms"] = decide_ms(engine, StepShape.uniform(count, args.k + 1))
            if args.kernels:
                line["kernels"] = kernels(engine, StepShape.uniform(count, args.k + 1))
            print_json(line)
        if args.prompt:
            line = {"prompt": args.prompt, "ms": prompt_ms(engine, args.prompt, pages)}
            if args.kernels:
                set_prompt(engine, args.prompt, pages)
                line["kernels"] = kernels(engine, prompt_shape(args.prompt), 1)
            print_json(line)


def fill_cache(cache: Tensor) -> None:
    """Fill a cache with random keys and values, or with random bytes if it is quantized."""
    if cache.dtype in (torch.bfloat16, torch.float16, torch.float32):
        cache.normal_()
    else:
        cache.view(torch.uint8).random_(0, 256)


def set_rows(engine: Engine, rows: int, computed: int, pages: int) -> None:
    """Set rows 1 to `rows` of the table to `computed` tokens, each on separate pages."""
    table = worker_of(engine).table
    for row in range(1, rows + 1):
        table.tokens[row].random_(0, 1000)
        table.computed[row] = computed
        table.prompt_len[row] = 1
        table.folded[row] = computed
        first = 1 + (row - 1) * pages
        page_ids = list(range(first, first + pages))
        write_place(table, row, page_ids, row if worker_of(engine).state else 0)


def timed(engine: Engine, shape: StepShape, warm: int, times: int) -> float:
    """Return the mean ms of `times` steps after `warm` untimed ones."""
    for _ in range(warm):
        worker_of(engine).run_step(shape)
    timer = StepTimer(engine.plan.device)
    for _ in range(times):
        worker_of(engine).run_step(shape)
    timer.end()
    timer.wait()
    return round(timer.ms / times, 3)


def decide_ms(engine: Engine, shape: StepShape) -> float:
    """Return the mean ms of the second half of a step, repeated on one first half."""
    forward, decide = worker_of(engine).run_step
    forwarded = forward(shape)
    for _ in range(WARM):
        decide(forwarded)
    timer = StepTimer(engine.plan.device)
    for _ in range(REPLAYS):
        decide(forwarded)
    timer.end()
    timer.wait()
    return round(timer.ms / REPLAYS, 4)


def kernels(
    engine: Engine, shape: StepShape, times: int = PROFILED
) -> list[tuple[str, float, float]]:
    """Return (name, launches, us) of each kernel of a step, the slowest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            worker_of(engine).run_step(shape)
        torch.cuda.synchronize()
    kernels_by_time = [
        (event.key[:NAME], event.count / times, round(event.device_time_total / times, 1))
        for event in profiler.key_averages()
        if event.device_time_total
    ]
    return sorted(kernels_by_time, key=lambda kernel: -kernel[2])


def prompt_shape(tokens: int) -> StepShape:
    """Return the shape of a step that computes one whole prompt."""
    return StepShape(1, tokens, tokens, prompt=True)


def set_prompt(engine: Engine, tokens: int, pages: int) -> None:
    """Set one row of the table to a prompt of which no token is computed."""
    set_rows(engine, 1, 0, pages)
    worker_of(engine).table.inputs.fill(row_ids=[1], query_lens=[tokens])


def prompt_ms(engine: Engine, tokens: int, pages: int) -> float:
    """Return the lowest ms of a few prompts of one row, each in one step."""
    shape = prompt_shape(tokens)
    times = []
    for _ in range(1 + PROMPTS):
        set_prompt(engine, tokens, pages)
        times.append(timed(engine, shape, 0, 1))
    return min(times[1:])


if __name__ == "__main__":
    main()
