"""Exclusive bounds at whole numbers exclude these numbers, whatever the other bound is."""

from typing import Any

import pytest

from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.exclusive_bounds import move_whole_bounds
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.text.grammars.test_references import accepts
from tests.text.grammars.test_structured_output import MODEL

NUMBER = {"type": "number"}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("bounds", "excluded", "included"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0", "0.0", "-0"), ("0.5", "0.0001")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ("0", "0.5"), ("0.25",)),
        ({"exclusiveMinimum": 10, "maximum": 10.5}, ("10", "10.0"), ("10.5", "10.01")),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ("-1", "-1.0"), ("-1.5", "-1.001")),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("0", "-0"), ("-0.5", "-0.01")),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ("0",), ("0.5",)),
        ({"allOf": [{**NUMBER, "exclusiveMinimum": 0}, {"maximum": 0.5}]}, ("0",), ("0.5",)),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ("0", "1"), ("0.5",)),
        ({"minimum": 0.5, "exclusiveMaximum": 1}, ("1", "1.0"), ("0.9", "0.99", "0.999")),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, ("-1", "-1.0"), ("-0.9", "-0.99")),
        (
            {"allOf": [{**NUMBER, "exclusiveMinimum": 0}, {"exclusiveMaximum": 1}]},
            ("0", "1"),
            ("0.9", "0.99", "0.001"),
        ),
        ({"allOf": [{**NUMBER, "minimum": 9}, {"exclusiveMaximum": 100}]}, ("100",), ("99.9",)),
    ],
    ids=str,
)
def test_whole_bounds_are_excluded(
    compiler: Compiler, bounds: dict[str, Any], excluded: tuple[str, ...], included: tuple[str, ...]
) -> None:
    schema = bounds if "allOf" in bounds else {**NUMBER, **bounds}
    for text in excluded:
        assert not accepts(compiler, schema, text), text
    for text in included:
        assert accepts(compiler, schema, text), text


def test_integers_combined_with_moved_bounds(compiler: Compiler) -> None:
    schema = {"allOf": [{"type": "integer"}, {"exclusiveMinimum": 0, "exclusiveMaximum": 3}]}
    allowed = [
        text for text in ("-1", "0", "1", "2", "3", "1.5") if accepts(compiler, schema, text)
    ]
    assert allowed == ["1", "2"]


@pytest.mark.parametrize(
    "schema",
    [
        {**NUMBER, "exclusiveMinimum": 0},
        {**NUMBER, "exclusiveMinimum": 0, "maximum": 1},
        {**NUMBER, "exclusiveMinimum": 0.5, "maximum": 0.75},
        {**NUMBER, "minimum": 0.5, "exclusiveMaximum": 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {**NUMBER, "minimum": 0, "maximum": 0.5},
    ],
    ids=str,
)
def test_other_bounds_are_unchanged(schema: dict[str, Any]) -> None:
    assert move_whole_bounds(schema) == schema
