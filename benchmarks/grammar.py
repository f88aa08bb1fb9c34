"""What grammars cost on this machine: ms of a step with and without them, and ms of masks.

    python benchmarks/grammar.py steps [FOLDER] [--rows 1,8,64] [--k 0,3] [--kinds json,regex]
    python benchmarks/grammar.py masks [--rows 1,8,64] [--k 0,3] [--vocab 248320]

steps: decoding steps of the bundled model, or of FOLDER's config.json with random weights; all rows
are held to a grammar of the kind, `free` to none. With drafts, MTP makes them, and then those of a
first run's answer take their place, wrong at every fifth position: as random weights draft, nothing
that a grammar allows would ever be drafted. A run's ms is the median of its engine steps by the
clock, scheduling and reading included, and its CPU ms the median CPU time of one, which other work
on the machine disturbs less. Kinds are run in turn, so many rounds: of each the least is printed,
and the median over the rounds of what it adds to `free` in the same round. Tokens: those of a row
and step, on the mean.
masks: the masks of a step alone, as the runner makes them, at each place of a text: ms by the
clock, and ms of CPU. The vocabulary is made up: the bundled one's tokens and pairs of them.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from torch import Tensor

from lockstep import SamplingParams
from lockstep.check.oracle_drafter import OracleDrafter
from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine_builder import build_engine
from lockstep.scheduling.grammar import Wanted
from lockstep.scheduling.request import Request
from lockstep.spec import mtp
from lockstep.spec.drafter import DraftContext
from lockstep.step import PAGE_SIZE, StepContext, Verdict
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer
from lockstep.worker.build import find_model
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import NO_HOOKS, CheckHooks

PROMPT = "def read(path):"
LENGTH = 1024
"""Tokens of a row, at most."""
MOST_TOKENS = 900
WARM = 4
FREE = "free"
LONGEST = 24
"""Bytes of a token that is made up, at most."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "kind": {"enum": ["cat", "dog", "a longer one"]},
        "inner": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "day": {"type": "string", "format": "date"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = (
    'start: (NAME "=" sum ";")+\nsum: NAME | NUM | sum "+" sum | "(" sum ")"\n'
    "NAME: /[a-z]+/\nNUM: /[0-9]+/\n%ignore / +/"
)
TEXTS = {
    "JSON schema": (
        "start: %json " + json.dumps(SCHEMA),
        '{"name": "Some Name of \'length\' é", "age": 42, "tags": ["ab cd", "e"], '
        '"kind": "a longer one", "inner": {"x": -15.25, "day": "2026-11-23"}}',
    ),
    "any JSON object": ('start: %json {"type": "object"}', '{"a": [1, 2, {"b": null}], "c d": ""}'),
    "regex": ("start: /[a-z ]+(foo|bar)[0-9]{3,}/", "the foo of bar and foo12345"),
    "Lark": (LARK, "abc = def + (12 + x) ; y = 3 + 4;"),
    "choice": ('start: "left" | "right" | "somewhere else"', "somewhere else"),
}
LONG = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
KINDS: dict[str, dict[str, Any]] = {
    FREE: {},
    "json": {"json": LONG},
    "regex": {"regex": "([a-z ]+(foo|bar)[0-9]{3,};){1000}"},
    "lark": {"grammar": LARK.replace("+\nsum", "{1000}\nsum")},
}
"""Forms that no answer comes to the end of while it is timed."""


class MadeUp(Tokenizer):
    """The bundled tokenizer, whose vocabulary goes on with pairs of its own tokens: half of them
    have a blank in front, as words of most vocabularies do."""

    def __init__(self, vocab: int) -> None:
        super().__init__(find_model(None))
        own = super().__len__()
        self.spelled = [super(MadeUp, self).token_bytes(token) for token in range(own)]
        parts = [b for i, b in enumerate(self.spelled) if b and i not in self.special_ids]
        known = set(self.spelled)
        draw = random.Random(0)
        while len(self.spelled) < vocab:
            made = draw.choice((b"", b" ")) + draw.choice(parts) + draw.choice(parts)
            if made not in known and len(made) <= LONGEST:
                known.add(made)
                self.spelled.append(made)

    def __len__(self) -> int:
        return len(self.spelled)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, its own or made up."""
        return self.spelled[token_id]


class Told:
    """MTP with its cost, and in the place of its drafts those of answers that are known."""

    def __init__(self, context: DraftContext) -> None:
        self.inner = mtp.create(context)
        self.oracle = OracleDrafter(context)

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """See Drafter."""
        self.inner.propose(step, hidden, aux_hidden_states, verdict)
        self.oracle.propose(step, hidden, aux_hidden_states, verdict)


@dataclass(frozen=True)
class Timed:
    """Engine steps: ms by the clock and of CPU, the medians; tokens of a row and step, the mean."""

    clock: float
    worked: float
    tokens: float


def asked_for(processor: Processor, rows: int, wanted: dict[str, Any]) -> list[Request]:
    """The requests of a run, each with a prompt and a seed of its own."""
    requests = []
    for row in range(rows):
        asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": MOST_TOKENS, "seed": row}
        asked |= {"structured_outputs": wanted} if wanted else {"ignore_eos": True}
        params = SamplingParams(**asked, detokenize=False)
        requests += processor.requests(f"row-{row}", f"{PROMPT} # {row}", params)
    return requests


def timed(engine: Engine, requests: list[Request], steps: int) -> Timed:
    """Runs requests for so many decoding steps behind WARM others, and drops them."""
    for request in requests:
        engine.add(request)
    while not all(request.output_token_ids for request in requests):
        engine.step()
    for _ in range(WARM):
        engine.step()
    taken = []
    worked = []
    before = sum(len(request.output_token_ids) for request in requests)
    for _ in range(steps):
        began = time.perf_counter()
        busy = time.process_time()
        engine.step()
        worked.append(1000 * (time.process_time() - busy))
        taken.append(1000 * (time.perf_counter() - began))
    after = sum(len(request.output_token_ids) for request in requests)
    alive = engine.scheduler.num_running
    for request in requests:
        engine.abort(request.id)
    while engine.has_work():
        engine.step()
    assert alive == len(requests), "a row ended while steps were timed"
    return Timed(median(taken), median(worked), (after - before) / steps / alive)


def steps(asked: argparse.Namespace) -> None:
    """Prints a line for each number of drafts and of rows, and each kind of grammar."""
    print("| K | rows | held to | ms per step | CPU ms | tokens |")
    print("|---|---|---|---|---|---|", flush=True)
    kinds = [FREE, *(kind for kind in asked.kinds if kind != FREE)]
    for k in asked.k:
        drafting = {"method": "mtp", "num_speculative_tokens": k, "adaptive": False}
        config = EngineConfig.read(
            model=asked.folder,
            load_format="dummy" if asked.folder else "auto",
            max_model_len=LENGTH,
            max_num_seqs=max(asked.rows),
            num_gpu_blocks=max(asked.rows) * (LENGTH // PAGE_SIZE + 1) + 2,
            num_snapshots=0,
            row_buckets=tuple(sorted(asked.rows)),
            speculative_config=drafting if k else None,
        )
        engine = build_engine(config, hooks=CheckHooks(drafter=Told) if k else NO_HOOKS)
        vocab = engine.facts.vocab_size
        tokenizer = MadeUp(vocab)
        processor = Processor(tokenizer, None, LENGTH, tokenizer.eos_ids, vocab=vocab)
        answers = known_answers(engine, processor, kinds, asked) if k else {}
        for rows in asked.rows:
            for kind, found in runs(engine, processor, rows, kinds, answers, asked).items():
                print(f"| {k} | {rows} | {kind} | {' | '.join(found)} |", flush=True)
        del engine


def known_answers(
    engine: Engine, processor: Processor, kinds: Sequence[str], asked: argparse.Namespace
) -> dict[str, list[list[int]]]:
    """Per kind the texts of most rows, prompt and answer, long enough for runs that accept every
    draft. They are those of fewer rows too, since a row's answer does not depend on the others."""
    found = {}
    for kind in kinds:
        oracle(engine).set_texts([])
        requests = asked_for(processor, max(asked.rows), KINDS[kind])
        timed(engine, requests, engine.plan.query_len * (WARM + asked.steps))
        found[kind] = [[*one.prompt_token_ids, *one.output_token_ids] for one in requests]
    return found


def oracle(engine: Engine) -> OracleDrafter:
    """What a drafter of the engine is told answers by."""
    drafter = worker_of(engine).program.drafter
    assert isinstance(drafter, Told)
    return drafter.oracle


def runs(
    engine: Engine,
    processor: Processor,
    rows: int,
    kinds: Sequence[str],
    answers: dict[str, list[list[int]]],
    asked: argparse.Namespace,
) -> dict[str, list[str]]:
    """Per kind what is printed of its rounds: ms by the clock, of CPU, and tokens."""
    found: dict[str, list[Timed]] = {kind: [] for kind in kinds}
    for _ in range(asked.rounds):
        for kind in kinds:
            if answers:
                oracle(engine).set_texts(answers[kind])
            requests = asked_for(processor, rows, KINDS[kind])
            found[kind].append(timed(engine, requests, asked.steps))
    free = found[FREE]
    return {
        kind: [
            added([one.clock for one in rounds], [one.clock for one in free]),
            added([one.worked for one in rounds], [one.worked for one in free]),
            f"{rounds[0].tokens:.2f}",
        ]
        for kind, rounds in found.items()
    }


def added(held: list[float], free: list[float]) -> str:
    """The least, and the median of what each round adds to its own round without a grammar."""
    shares = [one / other - 1 for one, other in zip(held, free, strict=True)]
    return f"{min(held):.2f}, {median(shares):+.1%}"


def masks(asked: argparse.Namespace) -> None:
    """Prints a line for each kind of grammar, number of rows and of drafts."""
    tokenizer = MadeUp(asked.vocab)
    began = time.perf_counter()
    compiler = Compiler(tokenizer, asked.vocab, tokenizer.eos_ids)
    compiler.prepare()
    print(f"the vocabulary's tree: {time.perf_counter() - began:.2f} s, once\n")
    print("| grammar | rows | K | compile, CPU ms | CPU ms: mean, largest | ms: mean, largest |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, (source, text) in TEXTS.items():
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for count in asked.rows:
            for k in asked.k:
                began = time.process_time()
                rows = [compiler.matcher(source) for _ in range(count)]
                for row in rows:
                    row.prepare()
                compiled = 1000 * (time.process_time() - began) / count
                shape = [count * (1 + k), compiler.mask_bytes]
                memory = memoryview(bytearray(shape[0] * shape[1])).cast("B", shape=shape)
                worked = []
                taken = []
                for place in range(max(1, len(tokens) - k)):
                    ahead = tokens[place : place + k]
                    began = time.perf_counter()
                    busy = time.process_time()
                    wanted = [Wanted(row, ahead, i * (1 + k)) for i, row in enumerate(rows)]
                    compiler.fill(wanted, memory)
                    worked.append(1000 * (time.process_time() - busy))
                    taken.append(1000 * (time.perf_counter() - began))
                    for row in rows:
                        row.accept(tokens[place : place + 1])
                assert rows[0].fault is None, rows[0].fault
                print(
                    f"| {name} | {count} | {k} | {compiled:.2f} | {mean(worked):.2f}, "
                    f"{max(worked):.1f} | {mean(taken):.2f}, {max(taken):.1f} |",
                    flush=True,
                )


def main() -> None:
    """Reads the command line."""
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("steps", "masks"))
    parser.add_argument("folder", nargs="?", help="of a config.json; random weights")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64])
    parser.add_argument("--k", type=numbers, default=[0, 3])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=248_320)
    asked = parser.parse_args()
    steps(asked) if asked.what == "steps" else masks(asked)


if __name__ == "__main__":
    main()
