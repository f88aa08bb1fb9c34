"""Objects whose propertyNames are enforced, judged by jsonschema."""

import itertools
import json
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import create_model

from lockstep.errors import RequestError
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.structured_output import schema_of
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.text.grammars.test_references import accepts
from tests.text.grammars.test_structured_output import MODEL

INTEGER = {"type": "integer"}
ODD = ["a.b", "a b", "(", "^", "é", "a|b", "/", "-", "a\\b", '"']
SCHEMAS: list[dict[str, Any]] = [
    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
    {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a", "b"]},
    {"propertyNames": {"const": "a", "title": "x"}, "additionalProperties": INTEGER},
    {"propertyNames": {"pattern": "^[ab]{2}$"}, "additionalProperties": INTEGER},
    {"propertyNames": {"pattern": "b"}, "required": ["b"], "additionalProperties": INTEGER},
    {"propertyNames": {"enum": ODD}, "additionalProperties": INTEGER},
    {"allOf": [{"propertyNames": {"enum": ["a", "b"]}}, {"additionalProperties": INTEGER}]},
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_property_names_are_enforced(compiler: Compiler, schema: dict[str, Any]) -> None:
    schema = {"type": "object", **schema}
    names = ["a", "b", "ab", "abc", "c", *ODD]
    chosen = [[], *([name] for name in names), *itertools.permutations(("a", "b", "c"), 2)]
    judge = jsonschema.Draft202012Validator(schema)
    num_valid = 0
    for keys in chosen:
        for value in (1, "x"):
            one = dict.fromkeys(keys, value)
            valid = judge.is_valid(one)
            num_valid += valid
            # An answer has the properties in the order of the schema.
            orders = itertools.permutations(one.items())
            texts = [json.dumps(dict(order), ensure_ascii=False) for order in orders]
            assert any(accepts(compiler, schema, text) for text in texts) == valid, one
    assert num_valid


def test_keys_of_pydantic_are_enforced(compiler: Compiler) -> None:
    model = create_model("Model", counts=(dict[Literal["a", "b"], int], ...))
    schema = model.model_json_schema()
    assert "propertyNames" in schema["properties"]["counts"]
    assert accepts(compiler, schema, '{"counts": {"a": 1}}')
    assert not accepts(compiler, schema, '{"counts": {"c": 1}}')


@pytest.mark.parametrize(
    "names",
    [
        {"maxLength": 3},
        {"enum": ["a"], "pattern": "a"},
        {"enum": [1]},
        {"enum": []},
        {"format": "uuid"},
        {"$ref": "#/$defs/x"},
        False,
    ],
)
def test_other_property_names_are_refused(names: Any) -> None:
    schema = {"type": "object", "propertyNames": names, "$defs": {"x": {"enum": ["a"]}}}
    with pytest.raises(RequestError, match="propertyNames"):
        schema_of(schema, "field")
    with_names = {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"a": {}}}
    with pytest.raises(RequestError, match="propertyNames"):
        schema_of(with_names, "field")


@pytest.mark.parametrize("pattern", [r"^(?!_)", r"^(.)\1$"])
def test_names_of_an_unsupported_pattern_stay_property_names(pattern: str) -> None:
    """Tools that are not strict drop these, but would be refused with patternProperties."""
    schema = {"type": "object", "propertyNames": {"pattern": pattern}}
    assert schema_of(schema, "tools", strict=False) == {"type": "object"}
    with pytest.raises(RequestError, match="propertyNames"):
        schema_of(schema, "field")


def test_schema_that_a_reference_points_to_stays_in_place() -> None:
    """zod-to-json-schema refers to the place of a schema's first use."""
    counts = {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": INTEGER}
    total = {"$ref": "#/properties/counts/additionalProperties"}
    schema = {"type": "object", "properties": {"counts": counts, "total": total}}
    kept = schema_of(schema, "tools", strict=False)["properties"]["counts"]
    assert kept == {"type": "object", "additionalProperties": INTEGER}
    with pytest.raises(RequestError, match="propertyNames"):
        schema_of(schema, "field")


def test_copies_for_names_are_bounded() -> None:
    value = {"type": "string", "enum": ["x" * 1000]}
    names = {"enum": [f"name{i}" for i in range(1000)]}
    schema = {"type": "object", "propertyNames": names, "additionalProperties": value}
    with pytest.raises(RequestError, match="too many names"):
        schema_of(schema, "field")
