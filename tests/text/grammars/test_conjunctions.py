"""Conjunctions of regexes: usual ones compile, large ones are refused before any work."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.compiler import WRITTEN_ROW_ITEMS, Compiler
from lockstep.text.grammars.conjunctions import MAX_CONJOINED, MAX_NAME_PATTERNS
from lockstep.text.grammars.structured_output import compile_structured_output
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import masks_of

MODEL = Path(__file__).parents[3] / "lockstep" / "assets" / "model"
SECONDS = 1.0
"""Limit of CPU time; refused and accepted ones are far below."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a{number}.*b"} for number in range(count)]


def nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for number in range(count):
        schema = {"pattern": f"a{number}.*b", "anyOf": [schema, {"const": f"x{number}"}]}
    return schema


def chained_references(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {
        f"d{number}": {"$ref": f"#/$defs/d{number + 1}", "pattern": f"a{number}.*b"}
        for number in range(count)
    }
    links[f"d{count}"] = {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": links}


def property_names(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "patternProperties": {f"^a{number}.*b{number}$": {} for number in range(count)},
    }


def terminal(count: int, between: str = " ") -> str:
    return "start: A\nA: " + f"{between}& ".join(f"/.*a{number}.*b/" for number in range(count))


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"allOf": patterns(32)}},
        {"json": nested(28)},
        {"json": chained_references(64)},
        {"json": property_names(300)},
        {"grammar": terminal(32)},
        {"grammar": terminal(32, "\n")},
        {"grammar": terminal(32) + " # /"},
        {"grammar": 'start: /a\n/ | A # "/\n' + terminal(32).partition("\n")[2]},
        {"grammar": "start: A\nA: " + "~" * 40 + "/a/"},
        {"grammar": f"start: %json {json.dumps({'allOf': patterns(32)})}"},
        {
            "structural_tag": {
                "structures": [{"begin": "<a", "schema": {"allOf": patterns(32)}, "end": ""}],
                "triggers": ["<"],
            }
        },
    ],
    ids=range(11),
)
def test_large_conjunctions_are_refused(compiler: Compiler, fields: dict[str, Any]) -> None:
    """Without the bound they take minutes of CPU time, and some never end."""
    began = time.process_time()
    with pytest.raises(RequestError, match="allowed: at most") as caught:
        compile_structured_output(StructuredOutputsParams(**fields), compiler)
    assert caught.value.field == f"structured_outputs.{next(iter(fields))}"
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "array", "prefixItems": patterns(200)}},
        {"json": property_names(MAX_NAME_PATTERNS)},
        {"json": {"type": "object", "properties": {str(i): property_names(9) for i in range(20)}}},
        {"grammar": "start: A\nA: " + " & ".join(f"~/x{i}/" for i in range(MAX_CONJOINED // 2))},
        {"grammar": 'start: /a&b&c&d&e&f&g&h/ "' + "~" * 99 + '"'},
    ],
    ids=range(5),
)
def test_usual_conjunctions_compile(compiler: Compiler, fields: dict[str, Any]) -> None:
    began = time.process_time()
    compile_structured_output(StructuredOutputsParams(**fields), compiler)
    assert time.process_time() - began < SECONDS


AMBIGUOUS = [
    'start: e\ne: e "+" e | e e | "1" | ""',
    'start: a\na: a a | a a a | "1" | "11" | ""',
]


@pytest.mark.parametrize("source", AMBIGUOUS)
def test_ambiguous_grammar_ends_the_answer_early(compiler: Compiler, source: str) -> None:
    """The work per token grows with the square of the text's length."""
    matcher = compile_structured_output(StructuredOutputsParams(grammar=source), compiler)
    (one,) = compiler.tokenizer.encode("1", add_special_tokens=False)
    began = time.process_time()
    for _ in range(2 * WRITTEN_ROW_ITEMS):
        matcher.accept([one])
        if matcher.fault is not None:
            break
    assert matcher.fault is not None and "too complex" in matcher.fault
    assert not any(masks_of(matcher)[0])
    assert time.process_time() - began < 3 * SECONDS
