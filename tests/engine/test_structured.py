"""Structured output of the bundled model, validated by jsonschema and re, is the same in any
execution."""

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
STRUCTURES: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "lark": {"grammar": LARK},
    "gbnf": {"grammar": GBNF},
    "tag": {"structural_tag": TAG},
}


def validate(name: str, text: str) -> None:
    """Assert by independent means that a whole answer follows its structure."""
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


NAMES = [*list(STRUCTURES)[:3], "", *list(STRUCTURES)[3:]]
"""Structure of each of params(); "" is the request without one."""


def params(temperature: float) -> list[SamplingParams]:
    """Return a request with each structure, and one without."""
    results = [
        SamplingParams(
            temperature=temperature,
            seed=index,
            max_tokens=16,
            logprobs=1,
            structured_outputs=StructuredOutputsParams(**expected),
        )
        for index, expected in enumerate(STRUCTURES.values())
    ]
    return [*results[:3], replace(SEEDED, logprobs=1), *results[3:]]


ALL_PARAMS = [*params(1.0), *params(0.0)[:3]]
ALL_PROMPTS = [PROMPTS[index % len(NAMES) % len(PROMPTS)] for index in range(len(ALL_PARAMS))]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the validated answer to each of ALL_PARAMS, alone and without drafts."""
    llm = make_engine(None)
    results: list[Any] = []
    for prompt, requested, name in zip(ALL_PROMPTS, ALL_PARAMS, [*NAMES, *NAMES[:3]], strict=True):
        out = llm.generate(prompt, requested)[0]
        results.append(answer(out))
        one = out.outputs[0]
        if name and one.finish_reason == "stop":
            validate(name, one.text)
    return results


def random_draft_length(counts: tuple[int, ...]) -> RandomDraftLength:
    return RandomDraftLength(counts, random.Random(1))


@pytest.mark.default_cases("mtp-hooks3-settings3")
@pytest.mark.parametrize(
    ("drafter", "hooks", "settings"),
    [
        pytest.param(None, CheckHooks(), {}, marks=pytest.mark.slow),
        (None, CheckHooks(preempt_every=4), {"steps_in_flight": 2}),
        pytest.param("ngram", CheckHooks(), {}, marks=pytest.mark.slow),
        ("mtp", CheckHooks(), {"steps_in_flight": 2}),
        ("mtp", CheckHooks(draft_policy=random_draft_length, preempt_every=5), {}),
    ],
)
def test_structured_tokens_are_execution_independent(
    expected: list[Any], drafter: str | None, hooks: CheckHooks, settings: dict[str, Any]
) -> None:
    llm = make_engine(drafter, hooks, max_num_seqs=8, **settings)
    outs = llm.generate(ALL_PROMPTS, ALL_PARAMS)
    assert [answer(out) for out in outs] == expected
    if drafter == "mtp":
        assert sum(out.metrics.num_accepted_tokens for out in outs) > 20


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_engine("mtp")


@pytest.mark.default_cases("regex", "gbnf", "choice")
@pytest.mark.parametrize("name", ["json", "regex", "choice", "gbnf"])
@pytest.mark.parametrize("temperature", some_slow([0.0, 1.0], (1.0,)))
def test_finished_answers_follow_their_structure(llm: LLM, name: str, temperature: float) -> None:
    seeds = range(4) if temperature else range(1)
    requested = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=120, structured_outputs=STRUCTURES[name]
        )
        for seed in seeds
    ]
    ended = 0
    for out in llm.generate([PROMPTS[0]] * len(requested), requested):
        one = out.outputs[0]
        if one.finish_reason == "stop":
            validate(name, one.text)
            ended += 1
            assert one.token_ids[-1] in llm.processor.eos_ids
    assert ended >= 3 * len(seeds) / 4


def test_max_tokens_ends_structured_output(llm: LLM) -> None:
    requested = SamplingParams(temperature=0, max_tokens=5, structured_outputs=STRUCTURES["json"])
    one = llm.generate(PROMPTS[0], requested)[0].outputs[0]
    assert (one.finish_reason, len(one.token_ids)) == ("length", 5)


def test_each_completion_has_its_own_grammar(llm: LLM) -> None:
    requested = SamplingParams(n=3, temperature=1.2, seed=5, structured_outputs=STRUCTURES["regex"])
    outs = llm.generate(PROMPTS[0], requested)[0].outputs
    for one in outs:
        validate("regex", one.text)
    alone = llm.generate(PROMPTS[0], replace(requested, n=1, seed=6))[0].outputs[0]
    assert alone.token_ids == outs[1].token_ids


def test_structure_without_allowed_token_ends_with_error(llm: LLM) -> None:
    requested = SamplingParams(
        temperature=0, bad_words=["yes"], logit_bias=None, structured_outputs={"choice": ["yes"]},
        allowed_token_ids=[5],
    )  # fmt: skip
    one = llm.generate(PROMPTS[0], requested)[0].outputs[0]
    assert one.finish_reason == "error"
    assert one.token_ids == []


def test_synthetic_acceptance_refuses_grammars() -> None:
    llm = make_engine("mtp", synthetic_acceptance=0.5, load_format="dummy")
    with pytest.raises(RequestError, match="synthetic_acceptance"):
        llm.generate(PROMPTS[0], SamplingParams(structured_outputs={"choice": ["yes"]}))
