"""Prompt tokens that are found in the cache, by how far snapshots of recurrent state are apart.

    python benchmarks/snapshots.py FOLDER --gib 40 --every 32,256,1048576

The scheduler and the cache of an engine, without a model: pages and slots cost what config.json's
layers cost, and are as many as a GPU with so much memory left for the cache would get. Whatever the
distance, a prompt leaves a snapshot at its last whole page and where it parts from an earlier one.
Three traces, of requests one after another: conversations, which take turns in random order and
grow by the answer and by what is asked next, now and then a long text; documents, each of which is
asked other questions, in random order; and questions behind a few long instructions.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from lockstep.bench.floor import sketch
from lockstep.cache.cache import Cache, CacheConfig
from lockstep.config import EngineConfig, StepLimits
from lockstep.models.checkpoint import Checkpoint
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowResult
from lockstep.scheduling.scheduler import Scheduler
from lockstep.worker import memory
from lockstep.worker.build import step_limits
from lockstep.worker.memory_planner import Planner, Typed

COMMON = 2000
"""Tokens with which every prompt begins."""
ASKED = (100, 800)
"""Tokens of a question, at least and at most."""
DOCUMENT = (3000, 12000)
"""Tokens of a long one."""
LONG = 0.2
"""Share of the questions that are long."""
ANSWER = 300
"""Tokens of an answer."""
READ = (8000, 40000)
"""Tokens of a document that is asked about, at least and at most."""
TOLD = (3000, 9000)
"""Tokens of instructions, at least and at most."""
SORTS = 4
"""Instructions that there are."""
VOCAB = 100_000
MIB = 2**20


def main() -> None:
    """Reads the arguments and prints a line of JSON for each distance."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("folder", type=Path, help="a folder with config.json")
    ask.add_argument("--gib", type=float, default=40.0, help="memory that is left for the cache")
    ask.add_argument("--every", default="1,32,256,1048576", help="pages between snapshots")
    ask.add_argument("--texts", type=int, default=24, help="conversations, or documents")
    ask.add_argument("--turns", type=int, default=8, help="questions to each")
    ask.add_argument("--rows", type=int, default=16, help="max_num_seqs")
    ask.add_argument("--chunk", type=int, default=2048, help="max_num_batched_tokens")
    ask.add_argument("--length", type=int, default=131072, help="max_model_len")
    given = ask.parse_args()
    config = EngineConfig.read(
        model=str(given.folder),
        max_num_seqs=given.rows,
        max_num_batched_tokens=given.chunk,
        max_model_len=given.length,
        device="cpu",
        speculative_config=None,
    )
    model = sketch(given.folder, torch.bfloat16, None).model
    cost = memory.cache_bytes(memory.mixers(model, None))
    limits = step_limits(config, Checkpoint.read(given.folder), "cpu", None)
    typed = Typed(given.rows, given.chunk, config.num_snapshots)
    planner = Planner(typed, cost, limits.row_columns)
    entry = planner.ladder()[0]
    left = -planner.lacking(entry, int(given.gib * 2**30))
    size = memory.CacheSize(*planner.fill(entry, left))
    print(json.dumps({"page_mib": cost.page / MIB, "slot_mib": cost.slot / MIB, **vars(size)}))
    for trace in (conversations, documents, instructions):
        for every in map(int, given.every.split(",")):
            scheduler = scheduler_of(limits, size, every)
            prompts = trace(random.Random(0), given.texts, given.turns)
            taken = sum(snapshots(scheduler, prompt) for prompt in prompts)
            found = scheduler.cache
            line = {
                "trace": trace.__name__,
                "every": every,
                "found": round(found.hit_tokens / found.query_tokens, 4),
                "prompt_tokens": found.query_tokens,
                "computed_tokens": found.query_tokens - found.hit_tokens,
                "snapshots": taken,
                "snapshots_gib": round(taken * cost.slot / 2**30, 1),
            }
            print(json.dumps(line), flush=True)


def scheduler_of(limits: StepLimits, size: memory.CacheSize, every: int) -> Scheduler:
    """An engine's scheduler, with an empty cache."""
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


def tokens(draw: random.Random, bounds: tuple[int, int]) -> list[int]:
    """Random ones, so many at least and at most."""
    return [draw.randrange(VOCAB) for _ in range(draw.randint(*bounds))]


def order(draw: random.Random, texts: int, turns: int) -> list[int]:
    """Which text's turn it is."""
    left = [number for number in range(texts) for _ in range(turns)]
    draw.shuffle(left)
    return left


def conversations(draw: random.Random, texts: int, turns: int) -> Iterator[list[int]]:
    """Prompts that grow by answers and questions."""
    common = tokens(draw, (COMMON, COMMON))
    known = [list(common) for _ in range(texts)]
    for number in order(draw, texts, turns):
        known[number] += tokens(draw, DOCUMENT if draw.random() < LONG else ASKED)
        yield list(known[number])
        known[number] += tokens(draw, (ANSWER, ANSWER))


def documents(draw: random.Random, texts: int, turns: int) -> Iterator[list[int]]:
    """Prompts of a document and another question each."""
    common = tokens(draw, (COMMON, COMMON))
    read = [common + tokens(draw, READ) for _ in range(texts)]
    for number in order(draw, texts, turns):
        yield read[number] + tokens(draw, ASKED)


def instructions(draw: random.Random, texts: int, turns: int) -> Iterator[list[int]]:
    """Prompts of one of a few instructions and a question each."""
    told = [tokens(draw, TOLD) for _ in range(SORTS)]
    for _ in range(texts * turns):
        yield draw.choice(told) + tokens(draw, DOCUMENT if draw.random() < LONG else ASKED)


def snapshots(scheduler: Scheduler, prompt: list[int]) -> int:
    """Serves a prompt and two tokens -> how many snapshots it left."""
    taken = 0
    scheduler.add(Request("", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
    while scheduler.has_work():
        plan = scheduler.schedule()
        taken += sum(chunk.snapshot_slot > 0 for chunk in plan.prompt)
        ends = {chunk.row: RowResult([0]) for chunk in plan.prompt if chunk.last}
        decoded = {row: RowResult([0]) for row in plan.decode}
        scheduler.update(plan, Results(decoded | ends))
    return taken


if __name__ == "__main__":
    main()
