"""Integers of schemas: grammars allow exactly those that JSON readers read back."""

import json
from typing import Any

import pytest

from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.integer_bounds import LIMIT, add_integer_bounds
from lockstep.text.grammars.multiples import schemas_of
from lockstep.text.grammars.structured_output import compile_structured_output, json_expression
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import masks_of

INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


def allows(compiler: Compiler, schema: Any, text: str) -> bool:
    """Return whether a grammar of the schema allows the text as a complete answer."""
    matcher = compile_structured_output(StructuredOutputsParams(json=schema), compiler)
    for token in compiler.tokenizer.encode(text, add_special_tokens=False):
        if not masks_of(matcher)[0][token // 8] >> token % 8 & 1:
            return False
        matcher.accept([token])
    mask = masks_of(matcher)[0]
    return any(mask[end // 8] >> end % 8 & 1 for end in compiler.ends)


@pytest.mark.parametrize(
    "schema",
    [
        INTEGER,
        {"type": "integer", "description": "how many"},
        {"type": ["integer", "null"]},
        {"anyOf": [INTEGER, {"type": "null"}]},
        {"$ref": "#/$defs/count", "$defs": {"count": INTEGER}},
        {"$ref": "#/$defs/bounded-integer-0", "$defs": {"bounded-integer-0": INTEGER}},
        {"type": "integer", "minimum": 0},
        {"type": "integer", "exclusiveMinimum": -1},
        {"type": "integer", "maximum": 8e18},
    ],
)
def test_integers_are_bounded(compiler: Compiler, schema: Any) -> None:
    for text in ("0", "17", "1234567890123456789"):
        assert allows(compiler, schema, text)
    for text in (str(10**19), "1" * 400, "1" * 5000, "1.5", "1e5"):
        assert not allows(compiler, schema, text)
    lower = "minimum" in schema or "exclusiveMinimum" in schema
    assert allows(compiler, schema, "-17") is not lower
    assert not allows(compiler, schema, "-" + "1" * 30)


def test_bounds_of_the_schema_are_kept(compiler: Compiler) -> None:
    between = {"type": "integer", "minimum": 3, "maximum": 12}
    assert add_integer_bounds(between) == between
    assert allows(compiler, between, "12") and not allows(compiler, between, "13")
    # A large divisor and a range together take more than llguidance allows.
    coarse = {"type": "integer", "multipleOf": 9973}
    assert add_integer_bounds(coarse) == coarse
    for other in ({"type": "number"}, {"type": ["integer", "number"]}, {"enum": [1]}, {}):
        assert add_integer_bounds(other) == other
    above = {"type": "integer", "minimum": 9.1e18}
    assert add_integer_bounds(above) == above


def test_bounds_do_not_apply_to_other_types(compiler: Compiler) -> None:
    either = {"type": ["integer", "string"], "minimum": 5}
    assert allows(compiler, either, '"a"') and allows(compiler, either, "5")
    assert not allows(compiler, either, "4") and not allows(compiler, either, "9" * 20)


def test_equal_integers_share_one_definition(compiler: Compiler) -> None:
    """A range for each of 200 properties exceeds llguidance's limits."""
    names = [f"k{i}" for i in range(200)]
    schema = {"type": "object", "properties": dict.fromkeys(names, INTEGER), "required": names}
    (spelled,) = schemas_of(json_expression(StructuredOutputsParams(json=schema)) or "")
    assert spelled["$defs"] == {
        "bounded-integer-0": {
            "type": "integer",
            "exclusiveMinimum": -LIMIT,
            "exclusiveMaximum": LIMIT,
        }
    }
    assert allows(compiler, schema, json.dumps(dict.fromkeys(names, 7)))
    assert not allows(compiler, schema, json.dumps(dict.fromkeys(names, 10**20)))
