"""Numbers in JSON schemas: those that llguidance would change are refused; none crashes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.json_schema import drop_refused
from lockstep.text.grammars.structured_output import compile_structured_output
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import masks_of

MODEL = Path(__file__).parents[3] / "lockstep" / "assets" / "model"
LEAST = -(2**63)
REFUSED: list[Any] = [
    {"const": LEAST},
    {"const": LEAST + 1},
    {"const": {"a": [LEAST]}},
    {"enum": [1, "x", LEAST]},
    {"enum": [{"minimum": LEAST}]},
    {"type": "integer", "minimum": LEAST, "maximum": LEAST},
    {"type": "integer", "minimum": -1e300, "maximum": -(10**19)},
    {"type": ["integer", "null"], "exclusiveMinimum": -1e300, "exclusiveMaximum": -1e300},
    {"allOf": [{"type": "integer", "minimum": LEAST}, {"maximum": LEAST}]},
    {"properties": {"a": {"items": {"const": LEAST}}}},
    {"$ref": "#/elsewhere/a", "elsewhere": {"a": {"const": LEAST}}},
    {"oneOf": [{"type": "integer", "maximum": 2**63 - 1}], "enum": [-(10**19)]},
    {"type": "integer", "const": 10**19},
    {"const": 1e30},
    {"const": 2**53 + 1},
    {"const": -(2**53) - 1},
    {"const": 12345678901234567890},
    {"const": 123456789.12345679},
    {"enum": [0.9012221455094571]},
    {"type": "integer", "minimum": 2**53 + 1},
    {"type": "integer", "minimum": 1e300, "maximum": 1e300},
    {"type": "integer", "maximum": 2**53 + 1},
]
ALLOWED: list[tuple[Any, str]] = [
    ({"const": 2**53}, str(2**53)),
    ({"const": -(2**53)}, str(-(2**53))),
    ({"const": -(10**18)}, str(-(10**18))),
    ({"const": 0.1}, "0.1"),
    ({"const": -123456789.012345}, "-123456789.012345"),
    ({"enum": [True, 1]}, "true"),
    ({"type": "integer", "minimum": -(9 * 10**18)}, "-12"),
    ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, str(2**63 - 1)),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "7"),
    ({"type": "number", "minimum": 1e15, "maximum": 1e18}, "2000000000000000"),
    ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, str(2**53 - 1)),
    ({"properties": {"const": {"type": "integer"}, "minimum": {"type": "null"}}}, "{}"),
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


@pytest.mark.parametrize("schema", REFUSED, ids=lambda s: json.dumps(s)[:60])
def test_unsupported_numbers_are_named(compiler: Compiler, schema: Any) -> None:
    keyword = "'(const|enum|minimum|maximum|exclusiveMinimum|exclusiveMaximum)'"
    for fields in (
        {"json": schema},
        {"grammar": f"start: %json {json.dumps(schema)}"},
        {"structural_tag": {"structures": [_tag(schema)], "triggers": ["<a"]}},
    ):
        with pytest.raises(RequestError, match=keyword) as caught:
            compile_structured_output(StructuredOutputsParams(**fields), compiler)
        assert caught.value.field == f"structured_outputs.{next(iter(fields))}"


def _tag(schema: Any) -> dict[str, Any]:
    return {"begin": "<a>", "schema": schema, "end": "</a>"}


@pytest.mark.parametrize(("schema", "text"), ALLOWED, ids=lambda s: json.dumps(s)[:60])
def test_supported_numbers_are_allowed(compiler: Compiler, schema: Any, text: str) -> None:
    matcher = compile_structured_output(StructuredOutputsParams(json=schema), compiler)
    for token in compiler.tokenizer.encode(text, add_special_tokens=False):
        assert masks_of(matcher)[0][token // 8] >> token % 8 & 1, text
        matcher.accept([token])
    end = min(compiler.ends)
    assert masks_of(matcher)[0][end // 8] >> end % 8 & 1


def test_non_strict_tools_drop_unsupported_numbers() -> None:
    schema = {"type": "integer", "minimum": LEAST, "maximum": 5, "enum": [2**60 + 1]}
    assert drop_refused({"properties": {"a": schema}}) == {
        "properties": {"a": {"type": "integer", "maximum": 5}}
    }
