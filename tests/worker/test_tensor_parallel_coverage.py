"""Every architecture, weight format, KV cache format and drafter on two ranks against one.

The weights of most checkpoints are random.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.layers import sharding
from lockstep.models import ARCHITECTURES
from lockstep.spec import DRAFTERS
from lockstep.worker import executor
from tests.models.dense import random_oracle
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf import tokenizer_metadata
from tests.quantization.cases import CASES
from tests.spec.blocks import make_block_model
from tests.text.tiny_tokenizer import make_folder
from tests.thread_ranks import ThreadRanks
from tests.tiny_model import (
    CONFIG,
    DEEPSEEK,
    HYBRID_MOE,
    KIMI,
    LLAMA,
    MIXTRAL,
    NEMOTRON_H,
    NEXT,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    make_model,
)
from tests.worker.test_tensor_parallel import ASSETS, EAGLE3, MTP, NGRAM, generate

DOCS = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"
Config = dict[str, Any]
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
FAMILIES: dict[str, tuple[Config, Config]] = {
    "deepseek_v3": ({**DEEPSEEK, **SIX_HEADS}, MTP),
    "kimi_k2": ({**KIMI, **SIX_HEADS}, NGRAM),
    "kimi_k25": ({"model_type": "kimi_k25", "text_config": {**KIMI, **SIX_HEADS}}, NGRAM),
    "llama": ({**LLAMA, "attention_bias": True, "mlp_bias": True}, NGRAM),
    "mixtral": (MIXTRAL, NGRAM),
    "nemotron_h": ({**NEMOTRON_H, "num_attention_heads": 6}, NGRAM),
    "qwen2": (QWEN2, NGRAM),
    "qwen3": (QWEN3, NGRAM),
    "qwen3_5": ({"model_type": "qwen3_5", "text_config": CONFIG}, MTP),
    "qwen3_5_text": (CONFIG, MTP),
    "qwen3_5_moe": ({"model_type": "qwen3_5_moe", "text_config": HYBRID_MOE}, MTP),
    "qwen3_5_moe_text": (HYBRID_MOE, MTP),
    "qwen3_moe": (QWEN3_MOE, NGRAM),
    "qwen3_next": (NEXT, MTP),
}
"""model_type -> settings of config.json, drafter."""
DENSE = {
    **QWEN3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
INTEGERS = {"bits": 4, "group_size": 32, "sym": False}
WEIGHTS: dict[str, Config] = {
    **{name: case.settings for name, case in CASES.items()},
    "gptq": {"quant_method": "gptq", **INTEGERS, "desc_act": False},
    "gptq by activation": {"quant_method": "gptq", **INTEGERS, "desc_act": True},
    "gptq, 8 bits": {"quant_method": "gptq", **INTEGERS, "bits": 8, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    "auto-round": {"quant_method": "auto-round", **INTEGERS},
}
"""Weight format -> quantization_config."""
ROUNDED = ("fp8", "int8", "int4")
"""Values of --quantization for plain checkpoints."""
MIXTURES = ("fp8 blocks", "int4 asymmetric", "tensors nvfp4", "awq")
"""Weight formats of experts."""
GGUF = ("F16", "Q8_0", "Q5_1", "Q4_0")
LATENT = sorted(name for name, one in KV_FORMATS.items() if one.latent is not None)


def dummy(folder: Path, base: Config, **settings: Any) -> tuple[str, Config]:
    """Write a config.json; return its folder and the settings of its engine."""
    return str(make_model(folder, base)), {"load_format": "dummy", **settings}


def families(folder: Path, name: str) -> tuple[str, Config]:
    """Return a model of random weights of an architecture."""
    base, drafter = FAMILIES[name]
    return dummy(folder, base, speculative_config=drafter)


def weight_formats(folder: Path, name: str) -> tuple[str, Config]:
    """Return a dense model of random weights in a format."""
    base = {**DENSE, "quantization_config": WEIGHTS[name]}
    return dummy(folder, base, speculative_config=NGRAM)


def rounded_weights(folder: Path, name: str) -> tuple[str, Config]:
    """Return a trained hybrid mixture whose weights are quantized while they are loaded."""
    return "moe", {"quantization": name, "speculative_config": MTP}


def mixtures(folder: Path, name: str) -> tuple[str, Config]:
    """Return a mixture of random weights in a format."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    base = {**QWEN3_MOE, **sizes, "quantization_config": WEIGHTS[name]}
    return dummy(folder, base, speculative_config=NGRAM)


def gguf_files(folder: Path, name: str) -> tuple[str, Config]:
    """Return a model of random weights as a GGUF file with matrices of one type."""
    make_folder(folder)
    metadata = tokenizer_metadata(folder)
    size = {"vocab_size": len(metadata["ggml.tokens"]), "num_hidden_layers": 2}
    random_oracle(folder, "Qwen3", {**QWEN3, "hidden_size": 64}, **size)
    write_gguf(folder, folder / "model.gguf", lambda tensor: name, metadata)
    return str(folder / "model.gguf"), {"speculative_config": NGRAM}


def kv_formats(folder: Path, name: str) -> tuple[None, Config]:
    """Return the bundled hybrid with a format of keys and values."""
    return None, {"kv_cache_dtype": name, "speculative_config": MTP}


def latent_formats(folder: Path, name: str) -> tuple[str, Config]:
    """Return a trained model of latent attention with a format of latents."""
    return "deepseek_v3", {"kv_cache_dtype": name, "speculative_config": MTP}


def drafters(folder: Path, name: str) -> tuple[str | None, Config]:
    """Return a trained model with a drafter."""
    spec: Config = {"method": name, "num_speculative_tokens": 3}
    if name == "eagle3":
        return "qwen3", {"speculative_config": EAGLE3}
    if name == "draft_model":
        return "qwen3", {"speculative_config": {**spec, "model": str(ASSETS / "qwen3_draft")}}
    if name == "dflash":
        make_block_model(folder / "blocks", vocab=4096, hidden=256, aux_layers=[1, 3])
        spec["model"] = str(folder / "blocks")
    return None, {"speculative_config": spec}


LISTS: dict[str, tuple[Any, Collection[str]]] = {
    "architectures": (families, FAMILIES),
    "weight formats": (weight_formats, WEIGHTS),
    "weight formats of experts": (mixtures, MIXTURES),
    "types of GGUF files": (gguf_files, GGUF),
    "`--quantization`": (rounded_weights, ROUNDED),
    "KV cache formats": (kv_formats, KV_FORMATS),
    "KV cache formats of latents": (latent_formats, LATENT),
    "drafters": (drafters, DRAFTERS),
}
"""Row of the table in docs/tensor_parallel.md -> maker of a checkpoint, names."""


def cases() -> Iterator[Any]:
    """Yield every maker of a checkpoint with every name of its list."""
    for prepare, names in LISTS.values():
        for name in names:
            yield pytest.param(prepare, name, id=f"{prepare.__name__}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize(("prepare", "name"), list(cases()))
def test_two_ranks_answer_like_one(
    prepare: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = prepare(tmp_path, name)
    expected = generate(model, 1, settings)
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    assert generate(model, 2, settings) == expected


MODELS: dict[str | None, tuple[tuple[int, ...], Config]] = {
    None: ((2, 3, 6), MTP),
    "moe": ((2, 4), MTP),
    "nemotron_h": ((2,), MTP),
    "deepseek_v3": ((2, 4), MTP),
    "qwen3": ((2, 4), EAGLE3),
}
"""Trained checkpoint (None: the bundled one) -> all sizes that divide its heads or groups, drafter.
"""
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int4 weights": {"quantization": "int4"},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "TurboQuant cache": {"kv_cache_dtype": "turboquant_4bit_nc"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model or "bundled")
def test_every_number_of_ranks_answers_like_one(
    model: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, drafter = MODELS[model]
    settings = {**FORMATS[name], "speculative_config": drafter}
    monkeypatch.setattr(sharding, "VOCABULARY_TILE", 256)  # so that all ranks have some tokens
    expected = generate(model, 1, settings)
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    for size in sizes:
        assert generate(model, size, settings) == expected, size


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model or "bundled")
def test_other_numbers_of_ranks_are_refused(
    model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, _ = MODELS[model]
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    for size in {2, 3, 4, 6, 8} - set(sizes):
        allowed = ", ".join(map(str, (1, *sizes)))
        with pytest.raises(ConfigError, match=f"={size} is not allowed; allowed: {allowed}"):
            generate(model, size, {})


def test_every_architecture_is_listed() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()


def test_docs_list_the_cases_that_run() -> None:
    rows = [line.split("|")[1:3] for line in DOCS.read_text().splitlines() if line.startswith("|")]
    shown = {title.strip(): re.findall("`([^`]+)`", cell) for title, cell in rows}
    for title, (_, names) in LISTS.items():
        assert shown[title] == list(names), title
