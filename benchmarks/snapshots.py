"""Prefix cache hits by the distance between snapshots of recurrent state.

    python benchmarks/snapshots.py FOLDER --gib 40 --every 32,256,1048576

Runs the scheduler and the cache of an engine without a model. Pages and slots have the bytes of
config.json's layers, and their number is that of a GPU with --gib of memory for the cache. At every
distance, a prompt also leaves snapshots at its last full page and where it diverges from an earlier
prompt. Three traces of sequential requests: conversations in random order, which grow by each
answer and the next question or long text; documents with several questions each, in random order;
and questions after one of a few long instructions.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from lockstep.bench.floor import sketch
from lockstep.bench.measurement import parse_counts, print_json
from lockstep.cache.cache import Cache, CacheConfig
from lockstep.config import EngineConfig, StepLimits
from lockstep.models.checkpoint import Checkpoint
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowResult
from lockstep.scheduling.scheduler import Scheduler
from lockstep.worker import memory
from lockstep.worker.build import step_limits
from lockstep.worker.memory_planner import Planner, UserSizes

COMMON_PREFIX = 2000
"""Tokens that all prompts share at the beginning."""
QUESTION = (100, 800)
"""Minimum and maximum tokens of a question."""
DOCUMENT = (3000, 12000)
"""Minimum and maximum tokens of a long question."""
LONG_SHARE = 0.2
"""Share of long questions."""
ANSWER = 300
"""Tokens of an answer."""
QUESTIONED_DOCUMENT = (8000, 40000)
"""Minimum and maximum tokens of a document with questions."""
INSTRUCTIONS = (3000, 9000)
"""Minimum and maximum tokens of instructions."""
NUM_INSTRUCTIONS = 4
"""Number of different instructions."""
VOCAB = 100_000
MIB = 2**20


def main() -> None:
    """Read the arguments and print a line of JSON for each trace and distance."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder with config.json")
    parser.add_argument("--gib", type=float, default=40.0, help="memory for the cache")
    parser.add_argument(
        "--every", type=parse_counts, default="1,32,256,1048576", help="pages between snapshots"
    )
    parser.add_argument("--texts", type=int, default=24, help="conversations, or documents")
    parser.add_argument("--turns", type=int, default=8, help="questions to each")
    parser.add_argument("--rows", type=int, default=16, help="max_num_seqs")
    parser.add_argument("--chunk", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--length", type=int, default=131072, help="max_model_len")
    args = parser.parse_args()
    config = EngineConfig.read(
        model=str(args.folder),
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.chunk,
        max_model_len=args.length,
        device="cpu",
        speculative_config=None,
    )
    model = sketch(args.folder, torch.bfloat16, None).model
    cost = memory.cache_bytes(memory.mixers(model, None))
    limits = step_limits(config, Checkpoint.read(args.folder), "cpu", None)
    user_sizes = UserSizes(args.rows, args.chunk, config.num_snapshots)
    planner = Planner(user_sizes, cost, limits.row_columns)
    entry = planner.ladder()[0]
    free_bytes = -planner.missing_bytes(entry, int(args.gib * 2**30))
    size = memory.CacheSize(*planner.fill_cache(entry, free_bytes))
    print_json({"page_mib": cost.page / MIB, "slot_mib": cost.slot / MIB, **vars(size)})
    for trace in (conversations, documents, instructions):
        for every in args.every:
            scheduler = scheduler_of(limits, size, every)
            prompts = trace(random.Random(0), args.texts, args.turns)
            num_snapshots = sum(count_snapshots(scheduler, prompt) for prompt in prompts)
            cache = scheduler.cache
            line = {
                "trace": trace.__name__,
                "every": every,
                "hit_rate": round(cache.hit_tokens / cache.query_tokens, 4),
                "prompt_tokens": cache.query_tokens,
                "computed_tokens": cache.query_tokens - cache.hit_tokens,
                "snapshots": num_snapshots,
                "snapshots_gib": round(num_snapshots * cost.slot / 2**30, 1),
            }
            print_json(line)


def scheduler_of(limits: StepLimits, size: memory.CacheSize, every: int) -> Scheduler:
    """Return an engine's scheduler with an empty cache."""
    cache = Cache(
        CacheConfig(
            size.pages,
            limits.page_size,
            size.slots,
            limits.max_num_seqs,
            snapshot_every=every,
        )
    )
    return Scheduler(
        cache,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        query_len=1,
    )


def tokens(rng: random.Random, bounds: tuple[int, int]) -> list[int]:
    """Return random tokens; bounds: minimum and maximum number."""
    return [rng.randrange(VOCAB) for _ in range(rng.randint(*bounds))]


def order(rng: random.Random, texts: int, turns: int) -> list[int]:
    """Return the random order in which texts get their questions."""
    numbers = [number for number in range(texts) for _ in range(turns)]
    rng.shuffle(numbers)
    return numbers


def conversations(rng: random.Random, texts: int, turns: int) -> Iterator[list[int]]:
    """Yield prompts that grow by answers and questions."""
    common = tokens(rng, (COMMON_PREFIX, COMMON_PREFIX))
    known = [list(common) for _ in range(texts)]
    for number in order(rng, texts, turns):
        known[number] += tokens(rng, DOCUMENT if rng.random() < LONG_SHARE else QUESTION)
        yield list(known[number])
        known[number] += tokens(rng, (ANSWER, ANSWER))


def documents(rng: random.Random, texts: int, turns: int) -> Iterator[list[int]]:
    """Yield prompts of a document and a new question."""
    common = tokens(rng, (COMMON_PREFIX, COMMON_PREFIX))
    texts_read = [common + tokens(rng, QUESTIONED_DOCUMENT) for _ in range(texts)]
    for number in order(rng, texts, turns):
        yield texts_read[number] + tokens(rng, QUESTION)


def instructions(rng: random.Random, texts: int, turns: int) -> Iterator[list[int]]:
    """Yield prompts of instructions and a question."""
    systems = [tokens(rng, INSTRUCTIONS) for _ in range(NUM_INSTRUCTIONS)]
    for _ in range(texts * turns):
        yield rng.choice(systems) + tokens(rng, DOCUMENT if rng.random() < LONG_SHARE else QUESTION)


def count_snapshots(scheduler: Scheduler, prompt: list[int]) -> int:
    """Run a prompt with two output tokens; return the number of its snapshots."""
    num_snapshots = 0
    scheduler.add(Request("", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
    while scheduler.has_work():
        plan = scheduler.schedule()
        num_snapshots += sum(chunk.snapshot_slot > 0 for chunk in plan.prompt)
        ends = {chunk.row: RowResult([0]) for chunk in plan.prompt if chunk.last}
        decoded = {row: RowResult([0]) for row in plan.decode}
        scheduler.update(plan, Results(decoded | ends))
    return num_snapshots


if __name__ == "__main__":
    main()
