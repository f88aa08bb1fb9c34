"""Time of one scheduler step in us on a CPU, by the number of waiting requests.

    python benchmarks/waiting.py --waiting 100,2000,20000,100000,200000

A step is schedule() and update() with all rows decoding and the queue's head waiting for pages, as
in an offline job that has more prompts than rows. A third of the rows that started was moved to
host memory before the measurement, since their pages ran short; they are the head of the queue.
`queue_us` is the mean cost of add() and of abort() of a waiting request.
"""

import argparse
import gc
import statistics

from lockstep.bench.measurement import Stopwatch, parse_counts, print_json
from lockstep.cache.cache import Cache, CacheConfig
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowResult, Schedule
from lockstep.scheduling.scheduler import Scheduler

PAGE_SIZE = 512
PROMPT_TOKENS = 500
WARM_STEPS = 540
"""Steps until every row needs a third page, which a third of the rows does not get."""
MAX_STEPS = 480
"""Steps until the rows need a fourth page: a measurement ends before."""
MAX_TOKENS = 100_000
"""Output limit that no row reaches within a measurement."""
PRIORITIES = 7
"""Priorities that requests cycle through under the policy "priority"; the lowest runs first."""


def main() -> None:
    """Read the arguments and print one JSON line per policy and queue length."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--waiting", type=parse_counts, default="100,2000,20000,100000,200000", help="queue lengths"
    )
    parser.add_argument("--rows", type=int, default=24, help="running requests")
    parser.add_argument("--steps", type=int, default=200, help=f"measured steps, to {MAX_STEPS}")
    args = parser.parse_args()
    if not 1 <= args.steps <= MAX_STEPS:
        parser.error(f"--steps {args.steps} is not allowed; allowed: 1 to {MAX_STEPS}")
    for policy in ("fcfs", "priority"):
        for waiting in args.waiting:
            print_json(measure(policy, waiting, args.rows, args.steps))


def measure(policy: str, waiting: int, rows: int, steps: int) -> dict[str, object]:
    """Return the median cost of a step, and the mean of add() and abort(), in microseconds."""
    scheduler = build_scheduler(policy, rows)
    enqueue(scheduler, "running", rows)
    for _ in range(WARM_STEPS):
        step(scheduler)
    enqueue(scheduler, "waiting", waiting, priority=1)
    gc.collect()
    gc.freeze()  # as a serving engine does; else the collection of waiting requests is measured
    step_us = []
    for _ in range(steps):
        watch = Stopwatch()
        step(scheduler)
        step_us.append(watch.wall * 1e6)
    watch = Stopwatch()
    enqueue(scheduler, "late", steps, priority=1)
    for index in range(steps):
        scheduler.abort(f"late-{index}")
    queue_us = watch.wall * 1e6 / (2 * steps)
    return {
        "policy": policy,
        "waiting": waiting,
        "running": scheduler.num_running,
        "preempted": scheduler.num_swapped,
        "step_us": round(statistics.median(step_us), 1),
        "queue_us": round(queue_us, 2),
    }


def build_scheduler(policy: str, rows: int) -> Scheduler:
    """Return a scheduler with two pages for each of its rows."""
    cache = Cache(CacheConfig(num_pages=2 * rows + 1, page_size=PAGE_SIZE, max_num_seqs=rows))
    return Scheduler(
        cache,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * PAGE_SIZE,
        max_model_len=MAX_TOKENS,
        query_len=1,
        policy=policy,
    )


def enqueue(scheduler: Scheduler, name: str, count: int, priority: int = 0) -> None:
    """Add `count` requests; under the policy "priority" they have PRIORITIES different ones."""
    for index in range(count):
        tokens = [index % 1000] * PROMPT_TOKENS
        params = SamplingParams(max_tokens=MAX_TOKENS)
        rank = priority * (1 + index % PRIORITIES)
        scheduler.add(Request(f"{name}-{index}", tokens, params, rank))


def step(scheduler: Scheduler) -> Schedule:
    """Run one iteration in which every row emits one token."""
    plan = scheduler.schedule()
    rows = [*plan.decode, *(chunk.row for chunk in plan.prompt if chunk.last)]
    scheduler.update(plan, Results({row: RowResult([5]) for row in rows}))
    return plan


if __name__ == "__main__":
    main()
