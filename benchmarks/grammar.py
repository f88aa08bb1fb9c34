"""Cost of grammars on this machine: ms of a step with and without them, and ms of masks.

    python benchmarks/grammar.py steps [FOLDER] [--rows 1,8,64] [--k 0,3] [--kinds json,regex]
    python benchmarks/grammar.py masks [--rows 1,8,64] [--k 0,3] [--vocab 248320]

steps: times decoding steps of the bundled model, or of FOLDER's config.json with random weights.
All rows have a grammar of the kind; kind `free` has none. With K > 0, MTP runs at its full cost,
but the drafts are those of an earlier run's answer with every fifth one wrong: drafts of random
weights would never match a grammar. The ms of a run is the median engine step by the clock,
scheduling and reading included; the CPU ms is the median CPU time of a step, which other work on
the machine disturbs less. Each round runs all kinds. Printed are the minimum of each kind over the
rounds, the median of its increase over `free` of the same round, and the mean tokens of a row and
step.

masks: times the masks of a step alone, as the worker computes them, at each position of a text. The
vocabulary is synthetic: the bundled tokens and pairs of them.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from torch import Tensor

from lockstep import SamplingParams
from lockstep.bench.measurement import Stopwatch, model_settings, parse_counts, speculative_config
from lockstep.check.oracle_drafter import OracleDrafter
from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine_builder import build_engine
from lockstep.scheduling.grammar import GrammarMasks
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
"""Maximum tokens of a row."""
MAX_TOKENS = 900
WARM = 4
"""Untimed decoding steps before the timed ones."""
FREE = "free"
"""Kind without a grammar."""
MAX_TOKEN_BYTES = 24
"""Maximum bytes of a synthetic token."""
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
"""Name -> (grammar in Lark syntax, text that it matches), for the masks."""
LONG = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
"""JSON schema whose shortest answer exceeds a timed run."""
KINDS: dict[str, dict[str, Any]] = {
    FREE: {},
    "json": {"json": LONG},
    "regex": {"regex": "([a-z ]+(foo|bar)[0-9]{3,};){1000}"},
    "lark": {"grammar": LARK.replace("+\nsum", "{1000}\nsum")},
}
"""Kind -> structured output of its requests. No answer ends within a timed run."""


class SyntheticTokenizer(Tokenizer):
    """Bundled tokenizer with a vocabulary that is extended by pairs of its tokens.

    Half of the pairs begin with a space, as words of most vocabularies do.
    """

    def __init__(self, vocab: int) -> None:
        super().__init__(find_model(None))
        num_bundled = super().__len__()
        self.spelled = [
            super(SyntheticTokenizer, self).token_bytes(token) for token in range(num_bundled)
        ]
        parts = [b for i, b in enumerate(self.spelled) if b and i not in self.special_ids]
        known = set(self.spelled)
        draw = random.Random(0)
        while len(self.spelled) < vocab:
            candidate = draw.choice((b"", b" ")) + draw.choice(parts) + draw.choice(parts)
            if candidate not in known and len(candidate) <= MAX_TOKEN_BYTES:
                known.add(candidate)
                self.spelled.append(candidate)

    def __len__(self) -> int:
        return len(self.spelled)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a bundled or synthetic token."""
        return self.spelled[token_id]


class OracleMTP:
    """MTP drafter at its full cost whose drafts are replaced by those of known answers."""

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
        """Propose drafts; see Drafter."""
        self.inner.propose(step, hidden, aux_hidden_states, verdict)
        self.oracle.propose(step, hidden, aux_hidden_states, verdict)


@dataclass(frozen=True)
class StepFigures:
    """Figures of engine steps.

    wall_ms, cpu_ms: median ms by the clock and of CPU time. tokens: mean tokens of a row and step.
    """

    wall_ms: float
    cpu_ms: float
    tokens: float


def requests_of(processor: Processor, rows: int, constraint: dict[str, Any]) -> list[Request]:
    """Return the requests of a run; prompts and seeds differ."""
    requests = []
    for row in range(rows):
        fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": row}
        fields |= {"structured_outputs": constraint} if constraint else {"ignore_eos": True}
        params = SamplingParams(**fields, detokenize=False)
        requests += processor.requests(f"row-{row}", f"{PROMPT} # {row}", params)
    return requests


def timed(engine: Engine, requests: list[Request], steps: int) -> StepFigures:
    """Time `steps` decoding steps after WARM untimed ones, then abort the requests."""
    for request in requests:
        engine.add(request)
    while not all(request.output_token_ids for request in requests):
        engine.step()
    for _ in range(WARM):
        engine.step()
    wall_ms = []
    cpu_ms = []
    before = sum(len(request.output_token_ids) for request in requests)
    for _ in range(steps):
        watch = Stopwatch()
        engine.step()
        cpu_ms.append(1000 * watch.cpu)
        wall_ms.append(1000 * watch.wall)
    after = sum(len(request.output_token_ids) for request in requests)
    num_running = engine.scheduler.num_running
    for request in requests:
        engine.abort(request.id)
    while engine.has_work():
        engine.step()
    assert num_running == len(requests), "a row ended while steps were timed"
    return StepFigures(median(wall_ms), median(cpu_ms), (after - before) / steps / num_running)


def steps(args: argparse.Namespace) -> None:
    """Print a line for each number of drafts, number of rows, and kind of grammar."""
    print("| K | rows | grammar | ms per step | CPU ms | tokens |")
    print("|---|---|---|---|---|---|", flush=True)
    kinds = [FREE, *(kind for kind in args.kinds if kind != FREE)]
    for k in args.k:
        config = EngineConfig.read(
            **model_settings(args.folder),
            max_model_len=LENGTH,
            max_num_seqs=max(args.rows),
            num_gpu_blocks=max(args.rows) * (LENGTH // PAGE_SIZE + 1) + 2,
            num_snapshots=0,
            row_buckets=tuple(sorted(args.rows)),
            speculative_config=speculative_config("mtp", k),
        )
        engine = build_engine(config, hooks=CheckHooks(drafter=OracleMTP) if k else NO_HOOKS)
        vocab = engine.facts.vocab_size
        tokenizer = SyntheticTokenizer(vocab)
        processor = Processor(tokenizer, None, LENGTH, tokenizer.eos_ids, vocab=vocab)
        answers = known_answers(engine, processor, kinds, args) if k else {}
        for rows in args.rows:
            for kind, cells in runs(engine, processor, rows, kinds, answers, args).items():
                print(f"| {k} | {rows} | {kind} | {' | '.join(cells)} |", flush=True)
        del engine


def known_answers(
    engine: Engine, processor: Processor, kinds: Sequence[str], args: argparse.Namespace
) -> dict[str, list[list[int]]]:
    """Return prompts and answers of the largest batch by kind, long enough for any acceptance.

    They serve for fewer rows too, since a row's answer does not depend on the other rows.
    """
    answers = {}
    for kind in kinds:
        oracle(engine).set_texts([])
        requests = requests_of(processor, max(args.rows), KINDS[kind])
        timed(engine, requests, engine.plan.query_len * (WARM + args.steps))
        answers[kind] = [
            [*request.prompt_token_ids, *request.output_token_ids] for request in requests
        ]
    return answers


def oracle(engine: Engine) -> OracleDrafter:
    """Return the oracle drafter of an engine."""
    drafter = worker_of(engine).program.drafter
    assert isinstance(drafter, OracleMTP)
    return drafter.oracle


def runs(
    engine: Engine,
    processor: Processor,
    rows: int,
    kinds: Sequence[str],
    answers: dict[str, list[list[int]]],
    args: argparse.Namespace,
) -> dict[str, list[str]]:
    """Return the table cells of each kind: ms by the clock, CPU ms, and tokens."""
    rounds_by_kind: dict[str, list[StepFigures]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            if answers:
                oracle(engine).set_texts(answers[kind])
            requests = requests_of(processor, rows, KINDS[kind])
            rounds_by_kind[kind].append(timed(engine, requests, args.steps))
    free = rounds_by_kind[FREE]
    return {
        kind: [
            added([one.wall_ms for one in rounds], [one.wall_ms for one in free]),
            added([one.cpu_ms for one in rounds], [one.cpu_ms for one in free]),
            f"{rounds[0].tokens:.2f}",
        ]
        for kind, rounds in rounds_by_kind.items()
    }


def added(times: list[float], free: list[float]) -> str:
    """Return the minimum, and the median increase over the same round without a grammar."""
    shares = [one / other - 1 for one, other in zip(times, free, strict=True)]
    return f"{min(times):.2f}, {median(shares):+.1%}"


def masks(args: argparse.Namespace) -> None:
    """Print a line for each grammar, number of rows, and number of drafts."""
    tokenizer = SyntheticTokenizer(args.vocab)
    watch = Stopwatch()
    compiler = Compiler(tokenizer, args.vocab, tokenizer.eos_ids)
    compiler.prepare()
    print(f"the vocabulary's tree: {watch.wall:.2f} s, once\n")
    print("| grammar | rows | K | compile, CPU ms | CPU ms: mean, largest | ms: mean, largest |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, (source, text) in TEXTS.items():
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for count in args.rows:
            for k in args.k:
                watch = Stopwatch()
                rows = [compiler.matcher(source) for _ in range(count)]
                for row in rows:
                    row.prepare()
                compiled = 1000 * watch.cpu / count
                shape = [count * (1 + k), compiler.mask_bytes]
                memory = memoryview(bytearray(shape[0] * shape[1])).cast("B", shape=shape)
                cpu_ms = []
                wall_ms = []
                for position in range(max(1, len(tokens) - k)):
                    drafts = tokens[position : position + k]
                    watch = Stopwatch()
                    requested = [
                        GrammarMasks(row, drafts, i * (1 + k)) for i, row in enumerate(rows)
                    ]
                    compiler.fill(requested, memory)
                    cpu_ms.append(1000 * watch.cpu)
                    wall_ms.append(1000 * watch.wall)
                    for row in rows:
                        row.accept(tokens[position : position + 1])
                assert rows[0].fault is None, rows[0].fault
                print(
                    f"| {name} | {count} | {k} | {compiled:.2f} | {mean(cpu_ms):.2f}, "
                    f"{max(cpu_ms):.1f} | {mean(wall_ms):.2f}, {max(wall_ms):.1f} |",
                    flush=True,
                )


def main() -> None:
    """Read the command line and run one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("steps", "masks"))
    parser.add_argument("folder", nargs="?", help="folder of a config.json; weights are random")
    parser.add_argument("--rows", type=parse_counts, default=(1, 8, 64))
    parser.add_argument("--k", type=parse_counts, default=(0, 3))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=248_320)
    args = parser.parse_args()
    steps(args) if args.what == "steps" else masks(args)


if __name__ == "__main__":
    main()
