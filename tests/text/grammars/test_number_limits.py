"""Numbers in JSON: masks allow finite doubles of few digits only."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.compiler import AfterReasoning, Compiler, Matcher
from lockstep.text.grammars.number_limits import EXPONENT, INTEGER, STRING, JsonState, NumberLimit
from lockstep.text.grammars.structured_output import compile_structured_output
from lockstep.text.grammars.tool_calls import CallParams, ToolSyntax
from lockstep.text.parsers import TOOL_PARSERS
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import allows, masks_of

MODEL = Path(__file__).parents[3] / "lockstep" / "assets" / "model"
"""The bundled model; its vocabulary has tokens of up to three digits."""
GOOD = (
    "0", "-1", "17.25", "6.02e23", "1E-99", "1e+99", "1" * 100, "-" + "9" * 100 + "e99",
    "0." + "0" * 98 + "1e-99", "1" * 99 + ".5",
)  # fmt: skip
BAD = (
    "1e100", "1e999", "-1E+999", "1e0005", "2.5e-999", "1" * 101, "0." + "3" * 100, "1" * 400,
    "1" * 100 + ".5", "1" * 50 + "." + "1" * 51 + "e5",
)  # fmt: skip
ANY_NUMBER: list[Any] = [
    {"type": "number"},
    {},
    {"type": ["number", "null"]},
    {"anyOf": [{"type": "number"}, {"type": "string"}]},
]
TOOLS = [{"type": "function", "function": {"name": "get_1e5", "parameters": {"type": "object"}}}]
JSON_CALLS = (
    "hermes", "kimi_k2", "deepseek_v3", "deepseek_v31", "nemotron_json", "llama3_json",
)  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


def structured_grammar(compiler: Compiler, **fields: Any) -> Matcher:
    return compile_structured_output(StructuredOutputsParams(**fields), compiler)


def ids(compiler: Compiler, text: str) -> list[int]:
    return compiler.tokenizer.encode(text, add_special_tokens=False)


def is_answer(grammar: Any, compiler: Compiler, text: str) -> bool:
    """Return whether the grammar allows the text as a complete answer."""
    for token in ids(compiler, text):
        if not allows(masks_of(grammar)[0], token):
            return False
        grammar.accept([token])
    mask = masks_of(grammar)[0]
    return any(allows(mask, end) for end in compiler.ends)


@pytest.mark.parametrize("schema", ANY_NUMBER)
def test_numbers_are_finite_and_short(compiler: Compiler, schema: Any) -> None:
    for text in GOOD:
        assert is_answer(structured_grammar(compiler, json=schema), compiler, text), text
        assert math.isfinite(json.loads(text))
    for text in BAD:
        assert not is_answer(structured_grammar(compiler, json=schema), compiler, text), text


@pytest.mark.parametrize("text", [*GOOD, *BAD])
def test_numbers_are_limited_at_every_depth(compiler: Compiler, text: str) -> None:
    fits = text in GOOD
    for answer in (
        '{"a": %s}', '{"a": [true, %s ,null]}', '{"1e999": %s}', '{"a\\"": {"b\\\\": %s}}',
        '{"a": [%s, 0]}', '{"a": [0,%s]}',
    ):  # fmt: skip
        for fields in ({"json_object": True}, {"json": {}}):
            assert (
                is_answer(structured_grammar(compiler, **fields), compiler, answer % text) is fits
            )


@pytest.mark.parametrize("text", BAD)
def test_strings_and_constants_are_not_limited(compiler: Compiler, text: str) -> None:
    for answer in ('"%s"', '["a\\"%s"]', '{"%s": 1}', '{"a": "x: %s, 1"}'):
        assert is_answer(structured_grammar(compiler, json={}), compiler, answer % text)
    digits = {"type": "string", "pattern": "^[-+.eE0-9]+$"}
    assert is_answer(structured_grammar(compiler, json=digits), compiler, f'"{text}"')
    assert is_answer(
        structured_grammar(compiler, json={"const": f"{text}1"}), compiler, f'"{text}1"'
    )
    assert is_answer(structured_grammar(compiler, regex="[-+.eE0-9]+"), compiler, text)
    assert is_answer(structured_grammar(compiler, grammar="start: /[-+.eE0-9]+/"), compiler, text)
    assert is_answer(structured_grammar(compiler, choice=[text]), compiler, text)


def test_one_sided_bounds_limit_the_digits(compiler: Compiler) -> None:
    for schema in ({"type": "number", "minimum": 0}, {"type": "number", "exclusiveMaximum": 1e18}):
        assert is_answer(structured_grammar(compiler, json=schema), compiler, "0.5")
        assert is_answer(structured_grammar(compiler, json=schema), compiler, "0." + "3" * 99)
        assert not is_answer(structured_grammar(compiler, json=schema), compiler, "0." + "3" * 100)
    above = {"type": "number", "minimum": 0}
    assert is_answer(structured_grammar(compiler, json=above), compiler, "7" * 100)
    assert not is_answer(structured_grammar(compiler, json=above), compiler, "7" * 101)


def test_multiples_are_bounded_so_that_they_end(compiler: Compiler) -> None:
    for kind in ("integer", "number"):
        thirds = {"type": kind, "multipleOf": 3}
        assert is_answer(structured_grammar(compiler, json=thirds), compiler, "300000000000000000")
        assert not is_answer(structured_grammar(compiler, json=thirds), compiler, "3" * 20)
        assert not is_answer(structured_grammar(compiler, json=thirds), compiler, "4")
    cents = {"type": "number", "multipleOf": 0.01}
    assert is_answer(structured_grammar(compiler, json=cents), compiler, "12.34")
    assert not is_answer(structured_grammar(compiler, json=cents), compiler, "1.234")


def test_required_digits_are_allowed_beyond_the_limit(compiler: Compiler) -> None:
    tiny = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-120}
    assert is_answer(structured_grammar(compiler, json=tiny), compiler, "0." + "0" * 120 + "5")
    large = {"type": "integer", "multipleOf": 9973}
    assert is_answer(
        structured_grammar(compiler, json=large), compiler, str(9973 * (10**110 // 9973))
    )


def test_masks_after_drafts_are_those_of_the_same_tokens_accepted(compiler: Compiler) -> None:
    text = f'[6.02e23, {"4" * 99}, "1e999", 0.{"3" * 99}, 12e-99]'
    tokens = ids(compiler, text)
    following = structured_grammar(compiler, json={})
    accepted = []
    for token in tokens:
        accepted.append(masks_of(following)[0])
        following.accept([token])
    for size in (1, 2, 3, 7):
        drafting = structured_grammar(compiler, json={})
        for start, token in enumerate(tokens):
            masks = masks_of(drafting, tokens[start : start + size])
            assert masks[: len(tokens) - start] == accepted[start : start + size + 1]
            drafting.accept([token])


def test_random_answers_are_valid_json(compiler: Compiler) -> None:
    """Tokens are drawn from the masks, those of numbers with a higher probability."""
    texts = ("0123456789", "e", "E", "-", ".", "123", ",")
    numbers = [token for text in texts for token in ids(compiler, text)]
    for seed in range(12):
        draw = random.Random(seed)
        grammar = structured_grammar(compiler, json={"type": "array", "items": {"type": "number"}})
        answer: list[int] = []
        closing = ids(compiler, "]")[0]
        while True:
            mask = masks_of(grammar)[0]
            able = [token for token in numbers if allows(mask, token)]
            if any(allows(mask, end) for end in compiler.ends):
                break
            if allows(mask, closing) and len(answer) > 400:
                token = closing
            else:
                token = draw.choice(able or [i for i in range(compiler.vocab) if allows(mask, i)])
            answer.append(token)
            grammar.accept([token])
        values = json.loads(compiler.tokenizer.decode(answer))
        assert all(math.isfinite(float(value)) for value in values)


def test_limit_applies_after_reasoning_only(tokenizer: Tokenizer) -> None:
    compiler = Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)
    end = tokenizer.fast.token_to_id("</think>")
    grammar = AfterReasoning(structured_grammar(compiler, json={"type": "number"}), end, None)
    grammar.accept([*ids(compiler, 'see "1e999'), end])
    assert not is_answer(grammar, compiler, "1e999")


def call_grammar(name: str, compiler: Compiler, free_text: bool) -> Matcher:
    """Return a grammar of calls of a tool that takes any object."""
    syntax = ToolSyntax(TOOL_PARSERS[name], {})
    write = syntax.text_and_calls if free_text else syntax.calls_only
    tools = syntax.tools(TOOLS)
    json_after = syntax.json_after(tools, free_text)
    params = CallParams(grammar=write(tools, True), json_after=json_after)
    return compile_structured_output(params, compiler)


def call_text(name: str, number: str) -> str:
    """Return a call with a number among its arguments."""
    parser = TOOL_PARSERS[name]
    head, end = parser.head("get_1e5"), ""
    if name in ("hermes", "nemotron_json", "llama3_json"):
        key = "parameters" if name == "llama3_json" else "arguments"
        head, end = f'{{"name": "get_1e5", "{key}": ', "}"
    body = f'{head}{{"a": "1e999", "b": [{number}]}}{end}{getattr(parser, "LAST", "")}'
    one = f"{parser.TAGS[0]}{body}{parser.TAGS[1]}"
    return f"{parser.AROUND[0]}{one}{parser.BETWEEN}{one}{parser.AROUND[1]}"


@pytest.mark.parametrize("name", JSON_CALLS)
def test_arguments_of_calls_are_limited(compiler: Compiler, name: str) -> None:
    for number in ("6.02e23", "1e999", "1" * 101):
        fits = number == "6.02e23"
        assert (
            is_answer(call_grammar(name, compiler, False), compiler, call_text(name, number))
            is fits
        )


@pytest.mark.default_cases("hermes", "deepseek_v31")
@pytest.mark.parametrize("name", [name for name in JSON_CALLS if name != "llama3_json"])
def test_free_text_around_calls_is_not_limited(compiler: Compiler, name: str) -> None:
    """Quotes of free text open no JSON string."""
    text = f'The 6" pipe {{ [1e999] and {"1" * 200}: '
    assert is_answer(call_grammar(name, compiler, True), compiler, text)
    good = text + call_text(name, "6.02e23")
    assert is_answer(call_grammar(name, compiler, True), compiler, good)
    assert is_answer(call_grammar(name, compiler, True), compiler, good + "\n" + text)
    assert not is_answer(
        call_grammar(name, compiler, True), compiler, text + call_text(name, "1e999")
    )
    assert not is_answer(
        call_grammar(name, compiler, True), compiler, good + "\n" + call_text(name, "1e999")
    )


def test_structures_within_text_are_limited(compiler: Compiler) -> None:
    structures = [
        {"begin": '<f>{"a": ', "schema": {"type": "object"}, "end": "}</f>"},
        {"begin": "<g>", "schema": {"type": "array"}, "end": "</g>"},
    ]
    tag = {"structures": structures, "triggers": ["<f>", "<g>"]}
    text = 'so 1e999 "'
    for number, fits in (("6.02e23", True), ("1e999", False)):
        for part in (f'<f>{{"a": {{"b": {number}}}}}</f>', f"<g>[{number}]</g>"):
            grammar = structured_grammar(compiler, structural_tag=tag)
            assert is_answer(grammar, compiler, f"{text}{part}{text}") is fits
    complete = {"type": "json_schema", "json_schema": {"type": "number"}}
    grammar = structured_grammar(
        compiler, structural_tag={"type": "structural_tag", "format": complete}
    )
    assert not is_answer(grammar, compiler, "1e999")


def forbidden(tokens: Sequence[bytes], *state: Any) -> list[bytes]:
    """Return the forbidden next tokens of a vocabulary."""
    mask = NumberLimit(tokens).forbidden(JsonState(*state))
    return [token for i, token in enumerate(tokens) if mask >> i & 1]


def test_tokens_of_several_characters_are_checked_completely() -> None:
    tokens = [
        b"1", b"12", b"123", b"e", b".", b".5", b"e99", b"e999", b",", b"1,2", b"12,3", b"1e999",
        b",1e999", b'":1e999', b'"1e999"', b"a1e999", b"0" * 120, b"-5",
    ]  # fmt: skip
    complete = [b"1e999", b",1e999", b"0" * 120]
    assert forbidden(tokens, "value") == [b"1e999", b",1e999", b"0" * 120]
    assert forbidden(tokens, STRING) == [b'":1e999', b'"1e999"']
    assert forbidden(tokens, INTEGER, 1) == [b"e999", *complete]
    assert forbidden(tokens, INTEGER, 98) == [b"123", b"e999", *complete]
    assert forbidden(tokens, INTEGER, 99) == [b"12", b"123", b"e999", b"12,3", *complete]
    at_limit = [b"1", b"12", b"123", b".", b".5", b"e999", b"1,2", b"12,3", *complete]
    assert forbidden(tokens, INTEGER, 100) == at_limit
    assert forbidden(tokens, EXPONENT, 0) == [b"123", *complete[1:]]
    assert forbidden(tokens, EXPONENT, 2) == [b"1", b"12", b"123", b"1,2", b"12,3", *complete]
    assert forbidden(tokens, "text") == []
