"""Dates and times that exist: the patterns against datetime, and the grammars against them."""

import re
from datetime import date, datetime
from typing import Any

import pytest

from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.calendar_formats import PATTERNS
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.structured_output import compile_structured_output
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.text.grammars.test_references import accepts
from tests.text.grammars.test_structured_output import MODEL


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


def allows(compiler: Compiler, schema: dict[str, Any], text: str) -> bool:
    """Return whether an answer of this schema may be this text in quotes."""
    return accepts(compiler, schema, f'"{text}"')


def exists(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("year", [1, 4, 96, 100, 400, 1900, 1996, 2000, 2023, 2024, 2100, 9999])
def test_dates_are_those_of_datetime(year: int) -> None:
    for month in range(14):
        for day in range(33):
            text = f"{year:04d}-{month:02d}-{day:02d}"
            assert bool(re.search(PATTERNS["date"], text)) == exists(text), text


def test_every_leap_year_has_a_leap_day() -> None:
    for year in range(1, 10_000):
        text = f"{year:04d}-02-29"
        assert bool(re.search(PATTERNS["date"], text)) == exists(text), text


@pytest.mark.parametrize(
    "text", ["23:59:59Z", "00:00:00.125+23:59", "12:30:45-00:00", "2024-02-29T23:59:59+01:00"]
)
def test_times_can_be_parsed(text: str) -> None:
    form = "date-time" if "T" in text else "time"
    assert re.search(PATTERNS[form], text)
    assert datetime.fromisoformat(text if "T" in text else f"2024-01-01T{text}")


@pytest.mark.parametrize(
    ("form", "allowed", "refused"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "2023-04-30", "2023-04-31"),
        ("time", "23:59:59Z", "23:59:60Z"),
        ("time", "01:02:03.5+05:30", "01:02:03"),
        ("date-time", "2000-02-29T23:59:59Z", "2100-02-29T23:59:59Z"),
        ("date-time", "2023-02-28t00:00:00z", "2023-02-28T23:59:60Z"),
    ],
)
@pytest.mark.parametrize(
    "others",
    [{"type": "string"}, {"pattern": "[0-9]"}, {"allOf": [{"minLength": 4}], "pattern": ":|-"}],
)
def test_grammar_allows_what_exists(
    compiler: Compiler, form: str, allowed: str, refused: str, others: dict[str, Any]
) -> None:
    schema = {"format": form, **others}
    assert allows(compiler, schema, allowed)
    assert not allows(compiler, schema, refused)


def test_time_of_zod_has_no_time_zone(compiler: Compiler) -> None:
    """JSON Schema's time has one, so no text would match both."""
    for seconds in (r"(?::[0-5]\d(?:\.\d+)?)?", r":[0-5]\d", ""):
        pattern = rf"^(?:[01]\d|2[0-3]):[0-5]\d{seconds}$"
        schema = {"type": "string", "format": "time", "pattern": pattern}
        assert allows(compiler, schema, "23:59" if not seconds else "23:59:58")
        assert not allows(compiler, schema, "24:00")
        assert not allows(compiler, schema, "23:59:58Z")


def test_dates_count_as_no_conjoined_pattern(compiler: Compiler) -> None:
    fields = {f"f{i}": {"allOf": [{"type": "string", "format": "date"}]} for i in range(20)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    assert compile_structured_output(StructuredOutputsParams(json=schema), compiler)


def test_contradiction_names_the_property(compiler: Compiler) -> None:
    day = {"type": "string", "format": "date", "maxLength": 3}
    schema = {"type": "object", "properties": {"day": day}, "required": ["day"]}
    with pytest.raises(ValueError, match=r"'maxLength' at properties\.day of the schema"):
        compile_structured_output(StructuredOutputsParams(json=schema), compiler)
