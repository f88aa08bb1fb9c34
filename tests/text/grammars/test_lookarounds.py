"""Patterns without look-around against those that they replace, and schemas with them."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.lookarounds import EQUAL_PATTERNS
from lockstep.text.grammars.structured_output import compile_structured_output, schema_of
from lockstep.text.tokenizers.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "lockstep" / "assets" / "model"
ALPHABETS = ("a9.-_'+@", "P12YMWDTHS.,")
SEEDS = ("a.b'c@d-e.fg", "P1Y2M3DT4H5M6.7S", "P2W", "PT1S", "a@b.cd")


def variants(count: int) -> set[str]:
    """Return short texts of both alphabets, and texts that match with some characters changed."""
    rng = random.Random(5)
    texts = {""}
    for _ in range(count):
        alphabet = rng.choice(ALPHABETS)
        texts.add("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 9))))
        changed = list(rng.choice(SEEDS))
        for _ in range(rng.randint(0, 3)):
            position = rng.randrange(len(changed) + 1)
            changed[position : position + rng.randint(0, 1)] = rng.choice(alphabet)
        texts.add("".join(changed))
    return texts


@pytest.mark.parametrize("pattern", EQUAL_PATTERNS)
def test_patterns_match_the_same_texts(pattern: str) -> None:
    texts = variants(40_000)
    matches = {text for text in texts if re.search(pattern, text)}
    assert matches == {text for text in texts if re.search(EQUAL_PATTERNS[pattern], text)}
    assert len(matches) > 100


@pytest.mark.parametrize("pattern", EQUAL_PATTERNS)
@pytest.mark.parametrize("strict", [True, False])
def test_schema_with_look_around_compiles(pattern: str, strict: bool) -> None:
    tokenizer = Tokenizer(MODEL)
    compiler = Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)
    value = {"type": "string", "pattern": pattern}
    schema: dict[str, Any] = {"type": "object", "properties": {"x": value}, "required": ["x"]}
    assert compile_structured_output(StructuredOutputsParams(json=schema), compiler)
    # Tools that are not strict drop other patterns with look-around.
    kept = schema_of(schema, "tools", strict)
    assert kept["properties"]["x"]["pattern"] == EQUAL_PATTERNS[pattern]
