"""GGUF files of every architecture: against transformers, and against the same weights in
safetensors, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.models.dense import ask, bits, make_llm, prompts, random_oracle
from tests.models.gguf_files import write_gguf
from tests.models.oracle import RELATIVE, compare_tokens, logits_error
from tests.models.test_mixtures import add_draft_module, of_transformers
from tests.tiny_model import CONFIG, HYBRID_MOE, LLAMA, MIXTRAL, NEXT, QWEN2, QWEN3, QWEN3_MOE

Base = dict[str, Any]
WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Sizes of whole blocks of 32 columns."""
TWO_OF_THREE = {"num_hidden_layers": 3, "full_attention_interval": 2}
ALL_MIXED = {"mlp_only_layers": []}
FAMILIES: dict[str, tuple[str, Base, float]] = {
    "llama": ("Llama", LLAMA, 1.0),
    "llama, biases, tied": (
        "Llama",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        1.0,
    ),
    "mixtral": ("Mixtral", MIXTRAL, 1.0),
    "qwen2": ("Qwen2", QWEN2, 1.0),
    "qwen3": ("Qwen3", QWEN3, 1.0),
    "qwen3moe": ("Qwen3Moe", {**QWEN3_MOE, **ALL_MIXED}, 1.0),
    "qwen35": ("Qwen3_5", {**CONFIG, **TWO_OF_THREE}, 0.0),
    "qwen35moe": ("Qwen3_5Moe", {**HYBRID_MOE, **TWO_OF_THREE}, 0.0),
    "qwen3next": ("Qwen3Next", {**NEXT, **ALL_MIXED, **TWO_OF_THREE}, 0.0),
}
"""Name -> (its classes in transformers, settings, what its norms lie around)."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of this test for the folders that GGUF files stand for."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    (classes, base, centre) = FAMILIES[family]
    oracle = random_oracle(tmp_path, classes, of_transformers(base), centre)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path)
    llm = make_llm(path)
    for ids in prompts(2, 90):
        assert logits_error(llm, oracle, ids) < RELATIVE
        compare_tokens(oracle, ids, ask(llm, ids, 12).outputs[0].token_ids)
