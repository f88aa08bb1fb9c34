"""Evaluation of a model through the engine: python -m training.evaluate [--quick] [--json].

Answers are greedy, with K = 3 drafts of the chosen drafter; an answer is exact if its text equals
the reference. Cases come from the evaluation side of the word split, which training never draws
from; free requests are the handwritten ones of evaluation_sets/. Free continuations of held-out
source text are sampled as the Qwen3.5 family recommends, where a loop is a fault, and without a
penalty, to show how such a small model ends.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep import LLM, SamplingParams
from lockstep.outputs import RequestOutput
from lockstep.text.parsers import ReplyParser
from lockstep.text.parsers.qwen3_coder import Qwen3CoderParser
from training.corpus import stdlib_text, tasks
from training.evaluation_sets import blind_requests, development_requests
from training.evaluation_sets.request_set import Call, Requests

DRAFTS = 3
"""Drafts of every step."""
MAX_TOKENS = 1400
"""Limit above the longest answer: 200 primes take 1,050 tokens."""
FREE_TOKENS = 160
FREE: dict[str, dict[str, Any]] = {
    "free continuations": dict(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5),
    "free, no penalty": dict(temperature=0.8, top_p=0.95),
}
"""Sampling parameters of free continuations."""
LOOP_TOKENS = 48
LOOP_PERIOD = 12
"""Limits of a loop: the last 48 tokens repeat with a period of at most 12 tokens."""


@dataclass(frozen=True)
class Set:
    """Row of the table: task, number of cases, options of the task, and goals."""

    name: str
    task: str
    count: int
    characters: int = 0
    exact: float = 0.0
    accepted: float = 0.0


SETS = (
    Set("tool calls", "tools", 500, exact=0.95, accepted=2.5),
    Set("everyday tool calls", "daily", 100, exact=0.95),
    Set("needle at 1 K", "needle", 40, characters=2300, exact=0.95),
    Set("needle at 4 K", "needle", 40, characters=9500, exact=0.95),
    Set("needle at 8 K", "needle", 40, characters=19000, exact=0.95),
    Set("dialogue", "dialogue", 100, exact=0.95),
    Set("JSON", "json", 100, exact=0.95, accepted=2.5),
    Set("sequences", "sequence", 50, exact=0.9),
    Set("lists", "list", 50, exact=0.95),
    Set("code", "code", 50, accepted=1.8),
)


@dataclass(frozen=True)
class Written:
    """Row of the table: handwritten requests that need a call, or those that need none.

    An answer is right if the names and arguments of its calls are; if no tool fits, it must have no
    call.
    """

    part: Set
    requests: Requests
    calls: bool


WRITTEN = (
    Written(
        Set("free requests", "", 0, exact=0.97, accepted=2.5), development_requests.REQUESTS, True
    ),
    Written(Set("no tool fits", "", 0, exact=0.95), development_requests.REQUESTS, False),
    Written(Set("unseen requests", "", 0), blind_requests.REQUESTS, True),
    Written(Set("unseen, no tool fits", "", 0), blind_requests.REQUESTS, False),
)
"""Fault kinds of the development set went into the training data; the blind set stays apart."""


def samples(part: Set, count: int) -> list[tasks.Sample]:
    """Return the first `count` cases of a set."""
    options = {"characters": part.characters} if part.characters else {}
    seeds = range(10**9, 10**9 + count)
    return [tasks.draw(s, evaluation=True, task=part.task, **options) for s in seeds]


def measure(llm: LLM, part: Set, count: int) -> dict[str, Any]:
    """Return the exact share and the acceptance length of a set."""
    cases = samples(part, count)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, skip_special_tokens=False)
    outs = llm.generate([case.prompt for case in cases], params)
    wanted = [case.answer.removesuffix("<|im_end|>") for case in cases]
    right = sum(
        out.outputs[0].text.removesuffix("<|im_end|>") == answer
        and out.outputs[0].finish_reason == "stop"
        for out, answer in zip(outs, wanted, strict=True)
    )
    return _line(part, outs, right)


def _line(part: Set, outs: Sequence[RequestOutput], right: int) -> dict[str, Any]:
    """Return the figures of a row."""
    steps = sum(out.metrics.num_steps for out in outs)
    accepted = sum(out.metrics.num_accepted_tokens for out in outs)
    return {
        "set": part.name,
        "cases": len(outs),
        "prompt_tokens": round(sum(len(out.prompt_token_ids) for out in outs) / len(outs)),
        "exact": round(right / len(outs), 4),
        "acceptance_length": round(1 + accepted / max(steps, 1), 3),
    }


def calls_in(answer: str, tools: list[dict[str, Any]]) -> list[Call]:
    """Return the calls of an answer, as the server parses them."""
    reply = ReplyParser(None, Qwen3CoderParser(tools)).parse(answer.removesuffix("<|im_end|>"))
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


def free_requests(
    llm: LLM, line: Written, every: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row of handwritten requests, and the wrong answers."""
    written = tasks.written(line.requests)
    cases = [case for case in written if bool(case[1]) == line.calls][::every]
    params = SamplingParams(temperature=0.0, max_tokens=300, skip_special_tokens=False)
    outs = llm.generate([sample.prompt for sample, _ in cases], params)
    wrong = []
    for out, (sample, calls) in zip(outs, cases, strict=True):
        answer = out.outputs[0].text
        if calls_in(answer, sample.tools) != calls:
            wrong.append({"request": sample.messages[-1]["content"], "answer": answer})
    return _line(line.part, outs, len(cases) - len(wrong)), wrong


def loops(tokens: Sequence[int]) -> bool:
    """Return whether the tokens end in a loop."""
    end = tokens[-LOOP_TOKENS:]
    return len(end) == LOOP_TOKENS and any(
        all(end[i] == end[i - period] for i in range(period, LOOP_TOKENS))
        for period in range(1, LOOP_PERIOD + 1)
    )


def free(llm: LLM, name: str, count: int) -> dict[str, Any]:
    """Return the number of loops in sampled continuations of held-out source text."""
    rng = random.Random(0)
    prompts = [stdlib_text.document(rng, 300, True) for _ in range(count)]
    params = [
        SamplingParams(seed=i, max_tokens=FREE_TOKENS, ignore_eos=True, **FREE[name])
        for i in range(count)
    ]
    outs = llm.generate(prompts, params)
    return {
        "set": name,
        "cases": count,
        "loops": sum(loops(out.outputs[0].token_ids) for out in outs),
    }


def show(line: dict[str, Any]) -> None:
    """Print a row of the table."""
    cells = [f"{line['set']:<22}", f"{line['cases']:>6}"]
    if "loops" in line:
        cells.append(f"{line['loops']} repeat themselves")
    else:
        cells += [
            f"{line['prompt_tokens']:>9}",
            f"{line['exact']:>8.1%}",
            f"{line['acceptance_length']:>11.2f}",
        ]
    print(" ".join(cells), flush=True)


def drafting(drafter: str) -> dict[str, Any] | None:
    """Return the speculative_config of METHOD or METHOD=FOLDER with DRAFTS in every step."""
    if drafter == "none":
        return None
    method, _, folder = drafter.partition("=")
    every = {"method": method, "num_speculative_tokens": DRAFTS, "adaptive": False}
    return every | ({"model": folder} if folder else {})


def main() -> None:
    """Run the evaluation of the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--model", default=None, help="a model folder; the bundled model if not given")
    p.add_argument(
        "--drafter",
        default="mtp",
        metavar="METHOD[=FOLDER]",
        help="e.g. mtp, ngram, eagle3=FOLDER, draft_model=FOLDER; none drafts nothing",
    )
    p.add_argument("--quick", action="store_true", help="a tenth of the cases")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = p.parse_args()
    stdlib_text.load_filler()
    llm = LLM(model=args.model, speculative_config=drafting(args.drafter), max_num_seqs=16)
    if not args.json:
        print(f"{'set':<22} {'cases':>6} {'prompt':>9} {'exact':>8} {'acceptance':>11}")
    lines = []
    missed = []
    for part in SETS:
        line = measure(llm, part, max(4, part.count // 10) if args.quick else part.count)
        lines.append(line)
        if line["exact"] < part.exact or line["acceptance_length"] < part.accepted:
            missed.append(part.name)
        if not args.json:
            show(line)
    failed: list[dict[str, Any]] = []
    for written in WRITTEN:
        part = written.part
        line, wrong = free_requests(llm, written, 10 if args.quick else 1)
        lines.append(line)
        failed += wrong
        if line["exact"] < part.exact or line["acceptance_length"] < part.accepted:
            missed.append(part.name)
        if not args.json:
            show(line)
    for name in FREE:
        lines.append(free(llm, name, 50 if args.quick else 500))
        if not args.json:
            show(lines[-1])
    missed += [line["set"] for line in lines if line["set"] == next(iter(FREE)) and line["loops"]]
    if args.json:
        print(json.dumps({"sets": lines, "missed": missed, "wrong": failed}, indent=1))
    else:
        print("Every goal is met." if not missed else f"Short of its goal: {', '.join(missed)}.")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
