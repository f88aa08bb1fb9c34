"""What the bundled model can do: python -m training.evaluate [--quick] [--json].

Answers come from the engine, greedy, with the MTP drafter at K = 3; one is exact if its text equals
the reference. Cases come from the evaluation side of the word split, which training never draws
from. Free continuations of held-out source text are sampled: as the Qwen3.5 family recommends, and
there a loop counts as a fault; and without a penalty, to tell how so small a model ends.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep import LLM, SamplingParams
from training import tasks, text

DRAFTS = 3
FREE_TOKENS = 160
FREE: dict[str, dict[str, Any]] = {
    "free continuations": dict(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5),
    "free, no penalty": dict(temperature=0.8, top_p=0.95),
}
LOOP_TOKENS, LOOP_PERIOD = 48, 12
"""A loop: the last 48 tokens repeat with a period of at most 12 tokens."""


@dataclass(frozen=True)
class Set:
    """One line of the table: which task, how many cases, its options, and what is hoped for."""

    name: str
    task: str
    count: int
    characters: int = 0
    exact: float = 0.0
    accepted: float = 0.0


SETS = (
    Set("tool calls", "tools", 500, exact=0.95, accepted=2.5),
    Set("everyday tool calls", "daily", 100),
    Set("needle at 1 K", "needle", 40, characters=3400, exact=0.95),
    Set("needle at 4 K", "needle", 40, characters=14000, exact=0.95),
    Set("needle at 8 K", "needle", 40, characters=28000, exact=0.95),
    Set("dialogue", "dialogue", 100),
    Set("JSON", "json", 100, accepted=2.5),
    Set("sequences", "sequence", 50),
    Set("lists", "list", 50),
    Set("code", "code", 50, accepted=1.8),
)


def samples(part: Set, count: int) -> list[tasks.Sample]:
    """The first `count` cases of a set."""
    options = {"characters": part.characters} if part.characters else {}
    seeds = range(10**9, 10**9 + count)
    return [tasks.draw(s, evaluation=True, task=part.task, **options) for s in seeds]


def measure(llm: LLM, part: Set, count: int) -> dict[str, Any]:
    """Exact share and acceptance length of one set."""
    cases = samples(part, count)
    params = SamplingParams(temperature=0.0, max_tokens=600, skip_special_tokens=False)
    outs = llm.generate([case.prompt for case in cases], params)
    wanted = [case.answer.removesuffix("<|im_end|>") for case in cases]
    right = sum(
        out.outputs[0].text.removesuffix("<|im_end|>") == answer
        and out.outputs[0].finish_reason == "stop"
        for out, answer in zip(outs, wanted, strict=True)
    )
    steps = sum(out.metrics.num_steps for out in outs)
    accepted = sum(out.metrics.num_accepted_tokens for out in outs)
    return {
        "set": part.name,
        "cases": count,
        "prompt_tokens": round(sum(len(out.prompt_token_ids) for out in outs) / count),
        "exact": round(right / count, 4),
        "acceptance_length": round(1 + accepted / max(steps, 1), 3),
    }


def loops(tokens: Sequence[int]) -> bool:
    """Whether the end of the tokens goes round in a circle."""
    end = tokens[-LOOP_TOKENS:]
    return len(end) == LOOP_TOKENS and any(
        all(end[i] == end[i - period] for i in range(period, LOOP_TOKENS))
        for period in range(1, LOOP_PERIOD + 1)
    )


def free(llm: LLM, name: str, count: int) -> dict[str, Any]:
    """Continuations of held-out source text, sampled as FREE says, and how many of them loop."""
    rng = random.Random(0)
    prompts = [text.document(rng, 300, True) for _ in range(count)]
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
    """One row of the table."""
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


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--model", default=None, help="a model folder; the bundled model if not given")
    p.add_argument("--quick", action="store_true", help="a tenth of the cases")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = p.parse_args()
    text.load_filler()
    llm = LLM(
        model=args.model,
        speculative_config={"method": "mtp", "num_speculative_tokens": DRAFTS},
        max_num_seqs=16,
    )
    if not args.json:
        print(f"{'set':<22} {'cases':>6} {'prompt':>9} {'exact':>8} {'acceptance':>11}")
    lines, missed = [], []
    for part in SETS:
        line = measure(llm, part, max(4, part.count // 10) if args.quick else part.count)
        lines.append(line)
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
        print(json.dumps({"sets": lines, "missed": missed}, indent=1))
    else:
        print("Every goal is met." if not missed else f"Short of its goal: {', '.join(missed)}.")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
