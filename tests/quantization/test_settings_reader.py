"""Patterns of module names match as Python's regular expressions do, also those searched as plain
text."""

import re

import pytest

from lockstep.quantization import CheckpointLinear
from lockstep.quantization.settings_reader import NamePattern

MODULES = [
    CheckpointLinear(path, (f"model.language_model.{path}", f"model.{path}", path), 8, 8, None)
    for path in (
        "layers.1.mlp.gate",
        "layers.11.mlp.gate_proj",
        "layers.2.self_attn.q-proj",
        "head",
    )
]
TEXTS = {
    r".*mlp\.gate.*": r"mlp.gate",
    r".*layers\.1\.mlp": r"layers.1.mlp",
    r".*self_attn\.q\-proj.*": "self_attn.q-proj",
    ".*q-proj": "q-proj",
    ".*head": "head",
}
PATTERNS = [
    *TEXTS, "head", "mlp", r".*mlp\.gate$", r".*mlp.gate.*", r"model\.layers\.1", r".*\.\d+\.mlp",
    ".*", "", r"layers\.1\b.*", ".*(gate|up)_proj", r".*mlp\.gate.*.*", "^head", r".*\w+_proj.*",
    r"(?!.*mlp).*", r".*mlp\.", r".*\\.*",
]  # fmt: skip


@pytest.mark.parametrize("text", PATTERNS)
def test_patterns_match_as_regular_expressions(text: str) -> None:
    pattern = NamePattern(text)
    for module in MODULES:
        assert pattern.match(module) == any(re.match(text, name) for name in module.names)
        assert pattern.search(module) == any(re.search(text, name) for name in module.names)


def test_plain_text_patterns() -> None:
    actual = {text: NamePattern(text).substring for text in PATTERNS}
    rest = {r".*mlp\.": "mlp.", r".*\\.*": "\\"}
    assert {text: inside for text, inside in actual.items() if inside is not None} == TEXTS | rest
