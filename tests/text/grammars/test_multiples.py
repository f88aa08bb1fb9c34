"""The bound on multipleOf: llguidance has a state per remainder."""

import json
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.text.grammars.multiples import MAX_REMAINDERS, check_multiples

TOO_LARGE = [
    {"multipleOf": 2**31},
    {"multipleOf": 999_983, "type": "number"},
    {"multipleOf": 9_999_991e-7},
    {"multipleOf": MAX_REMAINDERS + 1},
    {"anyOf": [{"multipleOf": number} for number in range(9_001, 9_100, 2)]},
    {"properties": {f"p{n}": {"multipleOf": 9_001 + 2 * n} for n in range(50)}},
    {"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]},
    {"allOf": [{"multipleOf": 102_400_000}, {"multipleOf": 3}]},
    {"multipleOf": 997, "anyOf": [{"multipleOf": 991}]},
    {"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": {"multipleOf": 991}}},
    {"$ref": "#/const", "const": {"multipleOf": 2**31}},
]
ALLOWED = [
    {"multipleOf": MAX_REMAINDERS - 1},
    {"multipleOf": 1_000_000},
    {"multipleOf": 0.01},
    {"properties": {"price": {"multipleOf": 0.01}, "seconds": {"multipleOf": 86_400}}},
    {"properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 991}}},
    {"allOf": [{"$ref": "#/$defs/a"}], "title": "A", "$defs": {"a": {"multipleOf": 1_000_000}}},
    {"allOf": [{"multipleOf": 0.01}, {"multipleOf": 60}, {"multipleOf": 1_000}]},
    {"properties": {"multipleOf": {"type": "integer"}}},
    {"multipleOf": "3"},
]


def lark(schema: Any) -> str:
    return f"start: a\na: %json {json.dumps(schema)}\n"


@pytest.mark.parametrize("schema", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_remainders_are_bounded(schema: Any) -> None:
    with pytest.raises(RequestError, match="'multipleOf' are too large") as caught:
        check_multiples(lark(schema), "tools")
    assert caught.value.field == "tools"


@pytest.mark.parametrize("schema", ALLOWED, ids=range(len(ALLOWED)))
def test_usual_multiples_are_allowed(schema: Any) -> None:
    check_multiples(lark(schema), "tools")


def test_remainders_of_all_schemas_are_summed() -> None:
    half = lark({"multipleOf": MAX_REMAINDERS // 2 + 1})
    check_multiples(half, "grammar")
    with pytest.raises(RequestError):
        check_multiples(half + half, "grammar")


def test_keywords_with_escapes_are_recognised() -> None:
    with pytest.raises(RequestError):
        check_multiples(r'start: %json {"multiple\u004ff": 999983}', "grammar")


@pytest.mark.parametrize("source", ["start: %json {", "%json " + '{"a":' * 9_000, '"%json {x}"'])
def test_invalid_json_is_left_to_the_compiler(source: str) -> None:
    check_multiples(source, "grammar")
