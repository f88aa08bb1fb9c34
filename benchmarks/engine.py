"""ms of an engine's step, host and all: quoted in benchmarks/RESULTS.md beside step.py.

    python benchmarks/engine.py FOLDER --rows 1,8,64 --k 3 --acceptance 0.7 --context 4096

FOLDER holds a config.json; weights are random. Requests run through scheduler, launches two steps
deep, and results read back. Timed are the steps between the last request's first token and the
first request's last, in which nobody computes a prompt. One JSON line per number of rows; tokens/s
are those of these steps.
"""

import argparse
import json
import time
from dataclasses import dataclass, field

from lockstep import LLM, SamplingParams
from lockstep.outputs import RequestOutput

BEFORE = 64
"""Tokens in front of the context at which prompts end, so that answers lead past it."""
SETTLE = 8
"""Steps that do not count, while those in flight are read."""
BUDGET = 16384
"""Prompt tokens of a step: many, so that requests begin to answer at about the same time."""


@dataclass
class Window:
    """Where nobody computes a prompt: (seconds, steps launched, tokens emitted) of each reading."""

    llm: LLM
    rows: int
    tokens: dict[str, int] = field(default_factory=dict)
    marks: list[tuple[float, int, int]] = field(default_factory=list)
    ended: bool = False

    def see(self, output: RequestOutput) -> None:
        """Called for every request of every step that is read."""
        self.tokens[output.request_id] = len(output.outputs[0].token_ids)
        self.ended |= output.finished
        if len(self.tokens) == self.rows and not self.ended:
            steps = self.llm.engine.stats.steps_total
            told = sum(self.tokens.values())
            if self.marks and self.marks[-1][1] == steps:
                self.marks.pop()  # of the same reading: its last call has all its tokens
            self.marks.append((time.perf_counter(), steps, told))

    def figures(self) -> dict[str, float]:
        """ms a step and tokens/s."""
        first = next(i for i, m in enumerate(self.marks) if m[1] >= self.marks[0][1] + SETTLE)
        ends = zip(self.marks[first], self.marks[-2], strict=True)  # the last may be cut short
        seconds, steps, tokens = (after - before for before, after in ends)
        return {"ms": round(1000 * seconds / steps, 3), "tokens_per_s": round(tokens / seconds)}


def main() -> None:
    """Reads the arguments, builds the engine once, and times every number of rows."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("model")
    ask.add_argument("--rows", default="1,8,64", help="requests at once")
    ask.add_argument("--k", type=int, default=0, help="MTP drafts verified and made in a step")
    ask.add_argument("--acceptance", type=float, default=0.7, help="of drafts behind accepted ones")
    ask.add_argument("--context", type=int, default=4096, help="tokens in front of every row")
    ask.add_argument("--output-len", type=int, default=160, help="tokens per answer")
    given = ask.parse_args()
    rows = tuple(sorted(int(count) for count in given.rows.split(",")))
    spec = {"method": "mtp", "num_speculative_tokens": given.k, "adaptive": False}
    spec["synthetic_acceptance"] = given.acceptance
    llm = LLM(
        model=given.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=given.context + given.output_len,
        max_num_seqs=rows[-1],
        row_buckets=rows,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
        speculative_config=spec if given.k else None,
    )
    length = given.context - BEFORE
    params = SamplingParams(
        temperature=0, max_tokens=given.output_len, ignore_eos=True, detokenize=False
    )
    for count in rows:
        prompts = [{"prompt_token_ids": [17 * i + j for j in range(length)]} for i in range(count)]
        window = Window(llm, count)
        llm.generate(prompts, params, on_progress=window.see)
        what = {"rows": count, "k": given.k, "context": given.context}
        print(json.dumps(what | window.figures()), flush=True)


if __name__ == "__main__":
    main()
