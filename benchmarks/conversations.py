"""Time to the first token of conversations whose prefixes exceed the device's cache.

    python benchmarks/conversations.py [FOLDER] --talks 8 --turns 6 --first 1500 --more 400 \\
        --device-tokens 4096 --sizes 0,1,all

The turns of all conversations run one request at a time. The prompt of a turn is the conversation
so far and --more tokens. --sizes names engines: N has N GiB of host memory, and the device memory
of --device-tokens and --num-snapshots; "all" has a device cache for everything. All engines must
give the same answers. Each engine prints one line of JSON: shares of prompt tokens that the cache
hit, median time to the first token of later turns (by the clock, and in CPU time), and offloaded
and fetched GiB. FOLDER contains a config.json, and weights are random; without FOLDER the bundled
model runs.
"""

import argparse
import random
import statistics
from typing import Any

from lockstep import LLM
from lockstep.bench.measurement import Stopwatch, greedy_params, model_settings, print_json
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.scheduling.request import Request
from lockstep.step import PAGE_SIZE

VOCAB = 500
"""Upper bound of random token ids, valid in every model's vocabulary."""
ALL = "all"
"""Value of --sizes for a device cache for all conversations."""


class FirstTokenWatch:
    """Time to a request's first token: seconds by the clock, and CPU seconds of this process."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self.first_token: tuple[float, float] | None = None

    def on_update(self, request: Request) -> None:
        """Take the time when the first token arrives."""
        if self.first_token is None and request.output_token_ids:
            self.first_token = (self.watch.wall, self.watch.cpu)


def main() -> None:
    """Read the arguments, run the engines, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--talks", type=int, default=8, help="conversations")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--first", type=int, default=1500, help="tokens of a first turn")
    parser.add_argument("--more", type=int, default=400, help="tokens that each turn adds")
    parser.add_argument("--output-len", type=int, default=8, help="tokens of each answer")
    parser.add_argument(
        "--device-tokens", type=int, default=4096, help="capacity of the device's pages"
    )
    parser.add_argument("--num-snapshots", type=int, default=4, help="capacity of the device")
    parser.add_argument("--sizes", default="0,1,all", help="GiB of host memory, or all")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    longest = args.first + args.more * args.turns + args.output_len
    pages = -(-args.device_tokens // PAGE_SIZE) + 1
    all_pages = args.talks * (-(-longest // PAGE_SIZE) + 1) + 1
    snapshots = args.talks * args.turns * (longest // PAGE_SIZE)
    answers = []
    for size in args.sizes.split(","):
        unlimited = size == ALL
        config = EngineConfig.read(
            **model_settings(args.model),
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=2,
            num_gpu_blocks=all_pages if unlimited else pages,
            num_snapshots=min(snapshots, 256) if unlimited else args.num_snapshots,
            kv_offloading_size=0.0 if unlimited else float(size),
            kv_cache_dtype=args.kv_cache_dtype,
        )
        tokens, line = run_conversations(LLM.from_engine(build_engine(config)), args)
        answers.append(tokens)
        print_json({"host_gib": size, **line})
    same = all(tokens == answers[0] for tokens in answers)
    print_json({"same_answers": same})
    if not same:
        raise SystemExit("answers differ")


def run_conversations(llm: LLM, args: argparse.Namespace) -> tuple[list[list[int]], dict[str, Any]]:
    """Run the conversations; return their answers and the figures of the engine."""
    rng = random.Random(0)
    length = args.first + args.more * args.turns
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(args.talks)]
    params = greedy_params(args.output_len)
    answers = []
    later = []
    for turn in range(args.turns):
        for index, text in enumerate(texts):
            prompt = {"prompt_token_ids": text[: args.first + args.more * turn]}
            (request,) = llm.processor.requests(f"{turn}-{index}", prompt, params)
            watch = FirstTokenWatch()
            llm.engine.run([request], watch.on_update)
            answers.append(request.output_token_ids)
            if turn and watch.first_token:
                later.append(watch.first_token)
    stats = llm.engine.refresh_stats()
    wall, cpu = (statistics.median(values) for values in zip(*later, strict=True))
    line = {
        "hit_rate": round(stats.prefix_hits_total / stats.prefix_queries_total, 3),
        "found_in_host": round(stats.host_hits_total / stats.prefix_queries_total, 3),
        "ttft_ms": round(1000 * wall, 2),
        "ttft_cpu_ms": round(1000 * cpu, 2),
        "out_gib": round(stats.offloaded_bytes_total / 2**30, 4),
        "back_gib": round(stats.fetched_bytes_total / 2**30, 4),
        "host_pages_used": stats.host_pages_used,
    }
    return answers, line


if __name__ == "__main__":
    main()
