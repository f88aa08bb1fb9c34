"""Conversations in turn, whose prefixes the device has no room for: time to the first token.

    python benchmarks/conversations.py [FOLDER] --talks 8 --turns 6 --first 1500 --more 400 \\
        --device-tokens 4096 --sizes 0,1,all

Each turn of each conversation asks for what was said before and --more tokens, one request at a
time. An engine for each of --sizes: so many GiB of host memory, and device memory as
--device-tokens and --num-snapshots say; or "all", a device that holds everything. Answers have to
be the same in all of them. A line of JSON for each engine: shares of prompt tokens that were found,
medians of the time to the first token of later turns (by the clock, and in CPU seconds of the
process), and what moved. FOLDER holds a config.json, weights are random; the bundled model if left
out.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

from lockstep import LLM, SamplingParams
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.scheduling.request import Request
from lockstep.step import PAGE_SIZE

VOCAB = 500
"""Token ids that prompts are drawn from: every model's."""
ALL = "all"


class Watch:
    """Seconds from its beginning to a request's first token, by the clock and of this process."""

    def __init__(self) -> None:
        self.began = (time.perf_counter(), time.process_time())
        self.first: tuple[float, float] | None = None

    def see(self, request: Request) -> None:
        """Called when a request has got tokens."""
        if self.first is None and request.output_token_ids:
            now = (time.perf_counter(), time.process_time())
            self.first = (now[0] - self.began[0], now[1] - self.began[1])


def main() -> None:
    """Reads the arguments, runs the engines, prints a line for each."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("model", nargs="?")
    ask.add_argument("--talks", type=int, default=8, help="conversations")
    ask.add_argument("--turns", type=int, default=6)
    ask.add_argument("--first", type=int, default=1500, help="tokens of a first turn")
    ask.add_argument("--more", type=int, default=400, help="tokens that each turn brings")
    ask.add_argument("--output-len", type=int, default=8, help="tokens of each answer")
    ask.add_argument("--device-tokens", type=int, default=4096, help="that the device's pages hold")
    ask.add_argument("--num-snapshots", type=int, default=4, help="that the device holds")
    ask.add_argument("--sizes", default="0,1,all", help="GiB of host memory, or all")
    ask.add_argument("--kv-cache-dtype", default="auto")
    given = ask.parse_args()
    longest = given.first + given.more * given.turns + given.output_len
    pages = -(-given.device_tokens // PAGE_SIZE) + 1
    everything = given.talks * (-(-longest // PAGE_SIZE) + 1) + 1
    snapshots = given.talks * given.turns * (longest // PAGE_SIZE)
    answers = []
    for size in given.sizes.split(","):
        whole = size == ALL
        config = EngineConfig.read(
            model=given.model,
            load_format="dummy" if given.model else "auto",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=2,
            num_gpu_blocks=everything if whole else pages,
            num_snapshots=min(snapshots, 256) if whole else given.num_snapshots,
            kv_offloading_size=0.0 if whole else float(size),
            kv_cache_dtype=given.kv_cache_dtype,
        )
        said, line = talk(LLM.over(build_engine(config)), given)
        answers.append(said)
        print(json.dumps({"host_gib": size, **line}), flush=True)
    same = all(said == answers[0] for said in answers)
    print(json.dumps({"same_answers": same}))
    if not same:
        raise SystemExit("answers differ")


def talk(llm: LLM, given: argparse.Namespace) -> tuple[list[list[int]], dict[str, Any]]:
    """The conversations' answers, and what is told of them."""
    rng = random.Random(0)
    length = given.first + given.more * given.turns
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(given.talks)]
    params = SamplingParams(
        temperature=0, max_tokens=given.output_len, ignore_eos=True, detokenize=False
    )
    answers = []
    later = []
    for turn in range(given.turns):
        for index, text in enumerate(texts):
            prompt = {"prompt_token_ids": text[: given.first + given.more * turn]}
            (request,) = llm.processor.requests(f"{turn}-{index}", prompt, params)
            watch = Watch()
            llm.engine.run([request], watch.see)
            answers.append(request.output_token_ids)
            if turn and watch.first:
                later.append(watch.first)
    stats = llm.engine.refresh_stats()
    clock, spent = (statistics.median(values) for values in zip(*later, strict=True))
    line = {
        "found": round(stats.prefix_hits_total / stats.prefix_queries_total, 3),
        "found_in_host": round(stats.host_hits_total / stats.prefix_queries_total, 3),
        "ttft_ms": round(1000 * clock, 2),
        "ttft_cpu_ms": round(1000 * spent, 2),
        "out_gib": round(stats.offloaded_bytes_total / 2**30, 4),
        "back_gib": round(stats.fetched_bytes_total / 2**30, 4),
        "host_pages_used": stats.host_pages_used,
    }
    return answers, line


if __name__ == "__main__":
    main()
