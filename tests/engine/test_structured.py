"""Structured output of the bundled model: judged by jsonschema and re, equal however it is run."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from lockstep import LLM, SamplingParams, StructuredOutputsParams
from lockstep.errors import RequestError
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.worker.hooks import CheckHooks
from tests.bundled_model import PROMPTS, SEEDED, answer, make_engine
from tests.selection import some_slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
    },
    "$defs": {"pair": {"type": "object", "properties": {"x": {"type": "number"}},
                       "required": ["x"], "additionalProperties": False}},
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
}  # fmt: skip
REGEX = r"[a-z]{3,9}(-[0-9]{2}){1,3}"
CHOICES = ["yes", "no", 'maybe, but "who" knows\n']
LARK = 'start: pair+\npair: NAME "=" VALUE ";"\nNAME: /[a-z]{1,6}/\nVALUE: /[0-9]{1,3}/'
GBNF = 'root ::= "a" [0-9] [0-9]? "b"'
TAG = {
    "structures": [{"begin": "<f=", "schema": SCHEMA, "end": ">"}],
    "triggers": ["<f"],
}
WANTED: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "lark": {"grammar": LARK},
    "gbnf": {"grammar": GBNF},
    "tag": {"structural_tag": TAG},
}


def judge(name: str, text: str) -> None:
    """Whether a whole answer is what was asked for, by others' means."""
    if name == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif name == "regex":
        assert re.fullmatch(REGEX, text)
    elif name == "choice":
        assert text in CHOICES
    elif name == "lark":
        assert re.fullmatch(r"([a-z]{1,6}=[0-9]{1,3};)+", text)
    elif name == "gbnf":
        assert re.fullmatch(r"a[0-9][0-9]?b", text)
    else:
        assert not re.search(r"<f(?!=\{)", text)


NAMES = [*list(WANTED)[:3], "", *list(WANTED)[3:]]
"""Of params: "" is the request without a structure."""


def params(temperature: float) -> list[SamplingParams]:
    """Each structure, and between them a request without one."""
    found = [
        SamplingParams(
            temperature=temperature,
            seed=index,
            max_tokens=24,
            logprobs=1,
            structured_outputs=StructuredOutputsParams(**wanted),
        )
        for index, wanted in enumerate(WANTED.values())
    ]
    return [*found[:3], replace(SEEDED, logprobs=1), *found[3:]]


ASKED = [*params(1.0), *params(0.0)[:3]]
PROMPTS_OF = [PROMPTS[index % len(NAMES) % len(PROMPTS)] for index in range(len(ASKED))]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Each of ASKED alone, without drafts, and judged."""
    llm = make_engine(None)
    found: list[Any] = []
    for prompt, asked, name in zip(PROMPTS_OF, ASKED, [*NAMES, *NAMES[:3]], strict=True):
        out = llm.generate(prompt, asked)[0]
        found.append(answer(out))
        one = out.outputs[0]
        if name and one.finish_reason == "stop":
            judge(name, one.text)
    return found


def changing(counts: tuple[int, ...]) -> RandomDraftLength:
    return RandomDraftLength(counts, random.Random(1))


@pytest.mark.parametrize(
    ("drafter", "hooks", "settings"),
    [
        pytest.param(None, CheckHooks(), {}, marks=pytest.mark.slow),
        (None, CheckHooks(preempt_every=4), {"steps_in_flight": 2}),
        pytest.param("ngram", CheckHooks(), {}, marks=pytest.mark.slow),
        ("mtp", CheckHooks(), {"steps_in_flight": 2}),
        ("mtp", CheckHooks(draft_policy=changing, preempt_every=5), {}),
    ],
)
def test_tokens_do_not_depend_on_how_they_came(
    plain: list[Any], drafter: str | None, hooks: CheckHooks, settings: dict[str, Any]
) -> None:
    llm = make_engine(drafter, hooks, max_num_seqs=8, **settings)
    outs = llm.generate(PROMPTS_OF, ASKED)
    assert [answer(out) for out in outs] == plain
    if drafter == "mtp":
        assert sum(out.metrics.num_accepted_tokens for out in outs) > 20


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_engine("mtp")


@pytest.mark.parametrize("name", ["json", "regex", "choice", "gbnf"])
@pytest.mark.parametrize("temperature", some_slow([0.0, 1.0], (1.0,)))
def test_whole_answers_are_what_was_asked_for(llm: LLM, name: str, temperature: float) -> None:
    seeds = range(4) if temperature else range(1)
    asked = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=120, structured_outputs=WANTED[name]
        )
        for seed in seeds
    ]
    ended = 0
    for out in llm.generate([PROMPTS[0]] * len(asked), asked):
        one = out.outputs[0]
        if one.finish_reason == "stop":
            judge(name, one.text)
            ended += 1
            assert one.token_ids[-1] in llm.processor.eos_ids
    assert ended >= 3 * len(seeds) / 4


def test_max_tokens_cuts(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=5, structured_outputs=WANTED["json"])
    one = llm.generate(PROMPTS[0], asked)[0].outputs[0]
    assert (one.finish_reason, len(one.token_ids)) == ("length", 5)


def test_completions_of_one_request_have_a_grammar_each(llm: LLM) -> None:
    asked = SamplingParams(n=3, temperature=1.2, seed=5, structured_outputs=WANTED["regex"])
    outs = llm.generate(PROMPTS[0], asked)[0].outputs
    for one in outs:
        judge("regex", one.text)
    alone = llm.generate(PROMPTS[0], replace(asked, n=1, seed=6))[0].outputs[0]
    assert alone.token_ids == outs[1].token_ids


def test_what_leaves_no_token_ends_with_an_error(llm: LLM) -> None:
    asked = SamplingParams(
        temperature=0, bad_words=["yes"], logit_bias=None, structured_outputs={"choice": ["yes"]},
        allowed_token_ids=[5],
    )  # fmt: skip
    one = llm.generate(PROMPTS[0], asked)[0].outputs[0]
    assert one.finish_reason == "error"
    assert one.token_ids == []


def test_coins_and_grammars_do_not_go_together() -> None:
    coins = make_engine("mtp", synthetic_acceptance=0.5, load_format="dummy")
    with pytest.raises(RequestError, match="synthetic_acceptance"):
        coins.generate(PROMPTS[0], SamplingParams(structured_outputs={"choice": ["yes"]}))
