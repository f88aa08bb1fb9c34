"""Time of one captured step in ms, by rows. benchmarks/RESULTS.md quotes it.

    python benchmarks/step.py FOLDER --rows 1,8,64 --k 3 --context 4096 [--prompt 8192] [--kernels]
    python benchmarks/step.py FOLDER --rows 8 --prompt 1024,32768 --prompt-rows 1,8
    python benchmarks/step.py FOLDER --k 3 --drafter eagle3 --draft-model HEAD --halves
    python benchmarks/step.py FOLDER --tensor-parallel-size 2

FOLDER contains a config.json; weights are random, and so are the keys and values of the context.
Each row has --context tokens in the cache, computes 1 + K tokens and proposes K drafts. The
scheduler does not run: the step is replayed REPLAYS times, and the mean is printed, one JSON line
per number of rows, with the floor of a step on an H200. Of several ranks the floor is that of one,
and ranks_ms has the shortest and the longest mean. --kernels adds the launches and us of each
kernel, without the time in which an earlier kernel still runs. --halves adds the ms of the second
half of a step alone, which samples, accepts and drafts.

A prompt of more than PROMPT_STEP tokens is computed in several steps; the sum of their times is
printed. --prompt-rows computes that many prompts in each step. Prompt steps are padded and run as
graphs where those of a server are. --no-prompt-graphs runs them without graphs.
"""

import argparse
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.bench.measurement import (
    add_ranks_option,
    model_settings,
    parse_counts,
    print_json,
    speculative_config,
)
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.step import PAGE_SIZE, StepShape
from lockstep.worker.executor import executor_of
from lockstep.worker.rank_times import gather_times
from lockstep.worker.rows import write_pages_and_slot
from lockstep.worker.step_shapes import prompt_step
from lockstep.worker.step_timer import StepTimer
from lockstep.worker.worker import Worker

NAME = 80
"""Characters of a kernel's name in the output."""
WARM = 4
"""Untimed steps before the timed ones."""
REPLAYS = 30
"""Timed steps; their mean is printed."""
PROFILED = 3
"""Steps in the kernel profile."""
PROMPT_STEP = 8192
"""Maximum prompt tokens of a step, as in a server."""
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
    parser.add_argument("--activation-dtype", default="auto", help="fp8 quantizes activations")
    parser.add_argument(
        "--prompt", type=parse_counts, default=(), help="also time prompts of these lengths"
    )
    parser.add_argument(
        "--prompt-rows", type=parse_counts, default=(1,), help="prompts in one step"
    )
    parser.add_argument(
        "--no-prompt-graphs", action="store_true", help="run prompt steps without graphs"
    )
    parser.add_argument("--kernels", action="store_true", help="add launches and us of each kernel")
    add_ranks_option(parser)
    args = parser.parse_args()
    rows = tuple(sorted(args.rows))
    if max(args.prompt_rows) > rows[-1]:
        parser.error(f"--prompt-rows has more than the {rows[-1]} rows of --rows")
    length = max(args.context + 8 * PAGE_SIZE, max(args.prompt, default=0) + PAGE_SIZE)
    prompts = [(tokens, count) for tokens in args.prompt for count in args.prompt_rows]
    prompt_tokens = max((tokens * count for tokens, count in prompts), default=0)
    pages = -(-length // PAGE_SIZE)
    draft_model = {"model": args.draft_model} if args.draft_model else {}
    config = EngineConfig.read(
        **model_settings(args.model, args.ranks),
        max_model_len=length,
        max_num_seqs=rows[-1],
        row_buckets=rows,
        prompt_buckets=() if args.no_prompt_graphs else None,
        max_num_batched_tokens=max(2048, min(prompt_tokens, PROMPT_STEP)),
        num_gpu_blocks=rows[-1] * pages + 2,
        num_snapshots=0,
        kv_cache_dtype=args.kv_cache_dtype,
        activation_dtype=args.activation_dtype,
        speculative_config=speculative_config(args.drafter, args.k, **draft_model),
    )
    executor = executor_of(build_engine(config))
    call = executor.collective_rpc  # every rank runs the same steps
    call(fill_caches)
    for count in rows:
        floor = executor.facts.costs.step(count, args.k, args.context)
        line = {"rows": count, "k": args.k, "context": args.context, "ranks": args.ranks}
        line |= call(partial(measure_rows, args=args, count=count, pages=pages))
        print_json(line | {"floor_ms": round(floor.ms, 3)})
    for tokens, count in prompts:
        measure = partial(measure_prompt, args=args, tokens=tokens, count=count, pages=pages)
        print_json({"prompt": tokens, "prompt_rows": count, **call(measure)})


@torch.inference_mode()
def measure_rows(worker: Worker, args: Namespace, count: int, pages: int) -> dict[str, Any]:
    """Return the figures of steps of `count` rows, with a context of args.context tokens each."""
    set_rows(worker, count, args.context - AHEAD, pages)
    worker.table.inputs.fill(row_ids=list(range(1, count + 1)))
    shape = StepShape.uniform(count, args.k + 1)
    line: dict[str, Any] = {"ms": timed(worker, shape, WARM, REPLAYS)}
    if args.ranks > 1:
        times = gather_times(worker, line["ms"])
        line["ranks_ms"] = {"min": min(times), "max": max(times)}
    if args.kv_cache_dtype != "auto":
        line["kv"] = args.kv_cache_dtype
    if args.activation_dtype != "auto":
        line["activations"] = args.activation_dtype
    if args.halves:
        line["decide_ms"] = decide_ms(worker, shape)
    if args.kernels:
        line["kernels"] = kernels(worker, shape)
    return line


@torch.inference_mode()
def measure_prompt(
    worker: Worker, args: Namespace, tokens: int, count: int, pages: int
) -> dict[str, Any]:
    """Return the figures of `count` prompts of `tokens` tokens each."""
    line: dict[str, Any] = {"ms": prompt_ms(worker, tokens, count, pages)}
    if args.kernels:
        computed, step_tokens = prompt_steps(tokens, count)[0]
        set_prompts(worker, computed, step_tokens, count, pages)
        line["kernels"] = kernels(worker, prompt_shape(worker, step_tokens, count), 1)
    return line


@torch.inference_mode()
def fill_caches(worker: Worker) -> None:
    """Fill the keys and values of all pages."""
    for cache in worker.paged:
        fill_cache(cache)


def fill_cache(cache: Tensor) -> None:
    """Fill a cache with random keys and values, or with random bytes if it is quantized."""
    if cache.dtype in (torch.bfloat16, torch.float16, torch.float32):
        cache.normal_()
    else:
        cache.view(torch.uint8).random_(0, 256)


def set_rows(worker: Worker, rows: int, computed: int, pages: int) -> None:
    """Set rows 1 to `rows` of the table to `computed` tokens, each on separate pages."""
    table = worker.table
    torch.manual_seed(0)  # all ranks have the same tokens
    for row in range(1, rows + 1):
        table.tokens[row].random_(0, 1000)
        table.computed[row] = computed
        table.prompt_len[row] = 1
        table.folded[row] = computed
        first = 1 + (row - 1) * pages
        page_ids = list(range(first, first + pages))
        write_pages_and_slot(table, row, page_ids, row if worker.state else 0)


def timed(worker: Worker, shape: StepShape, warm: int, times: int) -> float:
    """Return the mean ms of `times` steps after `warm` untimed ones."""
    for _ in range(warm):
        worker.run_step(shape)
    timer = StepTimer(worker.plan.device)
    for _ in range(times):
        worker.run_step(shape)
    timer.end()
    timer.wait()
    return round(timer.ms / times, 3)


def decide_ms(worker: Worker, shape: StepShape) -> float:
    """Return the mean ms of the second half of a step, repeated on one first half."""
    forward, decide = worker.run_step
    (forwarded,) = forward(shape)
    for _ in range(WARM):
        decide(forwarded)
    timer = StepTimer(worker.plan.device)
    for _ in range(REPLAYS):
        decide(forwarded)
    timer.end()
    timer.wait()
    return round(timer.ms / REPLAYS, 4)


def kernels(
    worker: Worker, shape: StepShape, times: int = PROFILED
) -> list[tuple[str, float, float]]:
    """Return (name, launches, us) of each kernel of a step, the slowest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            worker.run_step(shape)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    spans = [(e.name[:NAME], e.time_range.start, e.time_range.end) for e in events]
    kernels_by_time = [
        (name, count / times, round(us / times, 1)) for name, (count, us) in added_us(spans).items()
    ]
    return sorted(kernels_by_time, key=lambda kernel: -kernel[2])


def added_us(spans: Iterable[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """Return name -> (launches, us) of kernels that ran at these times: (name, start, end), in us.

    A kernel that starts early waits for the previous one (worker/dependent_edges.py), so the sum of
    all durations is longer than a step. Counted is the time after all kernels that ended before it.
    """
    by_name: dict[str, tuple[int, float]] = {}
    latest = 0.0
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        count, us = by_name.get(name, (0, 0.0))
        by_name[name] = count + 1, us + end - max(start, latest)
        latest = end
    return by_name


def prompt_shape(worker: Worker, tokens: int, count: int) -> StepShape:
    """Return the shape of a step that computes `tokens` tokens of each of `count` prompts."""
    return prompt_step(worker.plan, [tokens] * count, worker.prompt_buckets)


def prompt_steps(tokens: int, count: int) -> list[tuple[int, int]]:
    """Return (tokens computed before, tokens of a step) of each step of `count` prompts."""
    step = max(PROMPT_STEP // count, 1)
    return [(begin, min(step, tokens - begin)) for begin in range(0, tokens, step)]


def set_prompts(worker: Worker, computed: int, tokens: int, count: int, pages: int) -> None:
    """Set `count` rows of the table to prompts whose next `tokens` tokens a step computes."""
    set_rows(worker, count, computed, pages)
    row_ids = list(range(1, count + 1))
    worker.table.inputs.fill(row_ids=row_ids, query_lens=[tokens] * count)


def prompt_ms(worker: Worker, tokens: int, count: int, pages: int) -> float:
    """Return the lowest ms of `count` prompts, of a few runs after an untimed one."""
    times = []
    for _ in range(1 + PROMPTS):
        total = 0.0
        for computed, step_tokens in prompt_steps(tokens, count):
            set_prompts(worker, computed, step_tokens, count, pages)
            total += timed(worker, prompt_shape(worker, step_tokens, count), 0, 1)
        times.append(round(total, 3))
    return min(times[1:])


if __name__ == "__main__":
    main()
