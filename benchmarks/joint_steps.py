"""Speed of a closed loop with joint steps, and with the same steps apart.

    python benchmarks/joint_steps.py FOLDER [--requests 128] [--streams 64]

FOLDER contains a config.json; weights are random. The same requests are answered three times: with
joint steps, whose graphs are captured then, with joint steps again, and with all steps apart. The
answers must be equal. Prints a JSON line per run: output tokens/s, ITL in ms at p50 and p99, the
number of joint steps, and the number of their graphs so far.
"""

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from lockstep import LLM
from lockstep.bench.measurement import greedy_params, model_settings, percentile, print_json
from lockstep.step import StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.joint_steps import JointSteps, Pair

RUNS = ("joint, with captures", "joint", "apart")
VOCAB = 4096
"""Bound of the prompts' token ids."""


class CountedJointSteps(JointSteps):
    """Joint steps that are counted, or never chosen. original: the worker's own choice."""

    def __init__(self, original: JointSteps) -> None:
        vars(self).update(vars(original))
        self.is_off = False
        self.count = 0

    def join(self, decode: StepShape, lengths: Sequence[int]) -> Pair | None:
        pair = None if self.is_off else super().join(decode, lengths)
        self.count += pair is not None
        return pair


def main() -> None:
    """Read the arguments, build the engine, and measure the runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="without it: the bundled model")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens of a step")
    parser.add_argument("--activation-dtype", default="auto", help="fp8 quantizes activations")
    args = parser.parse_args()
    llm = LLM(
        **model_settings(args.model),
        skip_tokenizer_init=True,
        max_num_seqs=args.streams,
        max_model_len=args.input_len + args.output_len + 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        activation_dtype=args.activation_dtype,
        enable_prefix_caching=False,
        speculative_config=None,
    )
    worker = worker_of(llm.engine)
    steps = worker.joint_steps = CountedJointSteps(worker.joint_steps)
    rng = random.Random(5)
    prompts = [
        {"prompt_token_ids": rng.choices(range(VOCAB), k=args.input_len)}
        for _ in range(args.requests)
    ]
    expected: Any = None
    for run in RUNS:
        steps.is_off = run == "apart"
        steps.count = 0
        llm.engine.stats.drain()
        began = time.perf_counter()
        outputs = llm.generate(prompts, greedy_params(args.output_len), use_tqdm=False)
        seconds = time.perf_counter() - began
        answers = [output.outputs[0].token_ids for output in outputs]
        expected = expected or answers
        if answers != expected:
            raise SystemExit(f"{run}: the answers differ from those of the first run")
        gaps = llm.engine.stats.drain().itl_seconds
        print_json(
            {
                "run": run,
                "output_tokens_per_s": round(args.requests * args.output_len / seconds, 1),
                "itl_ms": [round(1000 * percentile(gaps, share), 1) for share in (0.5, 0.99)],
                "joint_steps": steps.count,
                "graphs": len(steps.graphs),
            }
        )


if __name__ == "__main__":
    main()
