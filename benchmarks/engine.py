"""Time of an engine step in ms, host time included. benchmarks/RESULTS.md quotes it.

    python benchmarks/engine.py FOLDER --rows 1,8,64 --k 3 --acceptance 0.7 --context 4096 [-tp 2]

FOLDER contains a config.json; weights are random. Requests pass through the scheduler, launches run
up to two steps ahead, and results are read back. The timed steps lie between the first token of the
last request and the last token of the first request, so that none of them computes a prompt. Prints
one JSON line per number of rows; tokens/s counts these steps only.
"""

import argparse
import time
from dataclasses import dataclass, field

from lockstep import LLM
from lockstep.bench.measurement import (
    add_ranks_option,
    greedy_params,
    model_settings,
    parse_counts,
    print_json,
    speculative_config,
)
from lockstep.outputs import RequestOutput

BEFORE = 64
"""Tokens between the end of a prompt and --context, so that answers grow past the context."""
SETTLE = 8
"""Untimed steps at the beginning, while results of earlier steps are read."""
BUDGET = 16384
"""Prompt tokens of a step; a high limit makes all requests start to answer close together."""


@dataclass
class Window:
    """Readings of the engine while no request computes a prompt.

    marks: (seconds, steps launched, tokens emitted) of each reading.
    """

    llm: LLM
    rows: int
    tokens: dict[str, int] = field(default_factory=dict)
    marks: list[tuple[float, int, int]] = field(default_factory=list)
    ended: bool = False

    def on_update(self, output: RequestOutput) -> None:
        """Record a reading. The engine calls it for each request of each step."""
        self.tokens[output.request_id] = len(output.outputs[0].token_ids)
        self.ended |= output.finished
        if len(self.tokens) == self.rows and not self.ended:
            steps = self.llm.engine.stats.steps_total
            emitted = sum(self.tokens.values())
            if self.marks and self.marks[-1][1] == steps:
                self.marks.pop()  # the last call of a step has the tokens of all its requests
            self.marks.append((time.perf_counter(), steps, emitted))

    def figures(self) -> dict[str, float]:
        """Return the ms of a step and the tokens/s."""
        first = next(i for i, m in enumerate(self.marks) if m[1] >= self.marks[0][1] + SETTLE)
        ends = zip(self.marks[first], self.marks[-2], strict=True)  # the last may be cut short
        seconds, steps, tokens = (after - before for before, after in ends)
        return {"ms": round(1000 * seconds / steps, 3), "tokens_per_s": round(tokens / seconds)}


def main() -> None:
    """Read the arguments, build the engine once, and time every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=parse_counts, default="1,8,64", help="requests at once")
    parser.add_argument("--k", type=int, default=0, help="MTP drafts of a step")
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="acceptance probability of each next draft"
    )
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens of every row before its answer"
    )
    parser.add_argument("--output-len", type=int, default=160, help="tokens per answer")
    add_ranks_option(parser)
    args = parser.parse_args()
    rows = tuple(sorted(args.rows))
    llm = LLM(
        **model_settings(args.model, args.ranks),
        skip_tokenizer_init=True,
        max_model_len=args.context + args.output_len,
        max_num_seqs=rows[-1],
        row_buckets=rows,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
        speculative_config=speculative_config("mtp", args.k, synthetic_acceptance=args.acceptance),
    )
    length = args.context - BEFORE
    params = greedy_params(args.output_len)
    for count in rows:
        prompts = [{"prompt_token_ids": [17 * i + j for j in range(length)]} for i in range(count)]
        window = Window(llm, count)
        llm.generate(prompts, params, on_progress=window.on_update)
        setup = {"rows": count, "k": args.k, "context": args.context, "ranks": args.ranks}
        print_json(setup | window.figures())


if __name__ == "__main__":
    main()
