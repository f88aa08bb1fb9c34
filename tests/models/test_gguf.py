"""GGUF files of every architecture equal transformers, and equal the same weights in safetensors
bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode

from lockstep import LLM, SamplingParams
from lockstep.errors import ConfigError
from lockstep.models.gguf.folder import checkpoint_folder
from lockstep.models.gguf.tensors import gguf_weight_files
from lockstep.quantization.gguf_blocks import LAYOUTS, dequantize
from lockstep.quantization.weight_sink import FLOAT_DTYPES
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.models.dense import bits, generate_greedy, make_llm, prompts, random_oracle
from tests.models.gguf_files import write_gguf
from tests.models.oracle import RELATIVE, compare_tokens, logits_error
from tests.models.test_mixtures import add_draft_module, without_unknown_settings
from tests.text.tiny_tokenizer import make_folder
from tests.tiny_model import CONFIG, HYBRID_MOE, LLAMA, MIXTRAL, NEXT, QWEN2, QWEN3, QWEN3_MOE

Base = dict[str, Any]
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
"""Name -> (prefix of its classes in transformers, settings, mean of its norms)."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a cache folder of this test for the folders that represent GGUF files."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.default_cases("llama, biases, tied", "qwen2", "qwen35moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_transformers(family: str, tmp_path: Path) -> None:
    (classes, base, centre) = FAMILIES[family]
    oracle = random_oracle(tmp_path, classes, without_unknown_settings(base), centre)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path)
    llm = make_llm(path)
    for ids in prompts(2, 90):
        assert logits_error(llm, oracle, ids) < RELATIVE
        compare_tokens(oracle, ids, generate_greedy(llm, ids, 12).outputs[0].token_ids)


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16")
"""Types that the gguf package writes."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama folder whose rows are whole blocks of 32 columns."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    random_oracle(folder, "Llama", {**LLAMA, **sizes})
    return folder


def is_reordered(name: str) -> bool:
    """Return True if llama.cpp's converter reorders the rows of this tensor."""
    return "attn_q" in name or "attn_k" in name


def dequantized(tensors: dict[str, Any], kind: str) -> dict[str, torch.Tensor]:
    """Return the values of the matrices, quantized and dequantized by the gguf package."""
    number = GGMLQuantizationType[kind]
    values = {}
    for name, array in tensors.items():
        if array.ndim == 1:
            continue
        value = quants.dequantize(quants.quantize(array, number), number)
        if is_reordered(name):
            # Undo the row order of the writer; heads have 16 rows.
            went = np.arange(len(value)).reshape(-1, 2, 8).swapaxes(1, 2).flatten()
            value = value[np.argsort(went)]
        values[name] = torch.from_numpy(np.ascontiguousarray(value))
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_equal_gguf_package(kind: str, wide: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = dequantized(write_gguf(wide, path, lambda name: kind), kind)
    (shard,) = gguf_weight_files([path])
    views = {view.entry.name: name for name, view in shard.views.items()}
    for theirs, value in values.items():
        actual = shard.read(views[theirs], FLOAT_DTYPES)
        assert torch.equal(actual.float(), value), theirs
        if kind in LAYOUTS:
            assert shard.info(views[theirs]).dtype == kind
            blocks = shard.read(views[theirs], (torch.uint8,))
            assert torch.equal(dequantize(kind, blocks), value), theirs


def test_quantized_file_equals_dequantized_safetensors(wide: Path, tmp_path: Path) -> None:
    """Each layer has matrices of two types."""
    path = tmp_path / "model.gguf"

    def kind(name: str) -> str:
        return "Q8_0" if "attn_v" in name or "ffn_down" in name else "Q4_1"

    tensors = write_gguf(wide, path, kind)
    values: dict[str, torch.Tensor] = {}
    for one in ("Q4_1", "Q8_0"):
        values |= dequantized({n: a for n, a in tensors.items() if kind(n) == one}, one)
    (shard,) = gguf_weight_files([path])
    views = {view.entry.name: name for name, view in shard.views.items()}
    stored = load_file(wide / "model.safetensors")
    stored |= {views[name]: value for name, value in values.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((checkpoint_folder([path]) / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "gguf", "types": ["Q4_1", "Q8_0"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    ids = prompts(1, 60)[0]
    both = [generate_greedy(make_llm(path), ids, 12), generate_greedy(make_llm(folder), ids, 12)]
    assert bits(both[0]) == bits(both[1])


@pytest.mark.default_cases("qwen35")
@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
def test_gguf_draft_module_changes_no_bit(family: str, tmp_path: Path) -> None:
    (classes, base, centre) = FAMILIES[family]
    random_oracle(tmp_path, classes, without_unknown_settings(base), centre)
    add_draft_module(tmp_path, in_config=True)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path)
    drafting = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    ids = prompts(1, 60)[0]
    outputs = [
        generate_greedy(make_llm(path, speculative_config=d), ids, 12) for d in (None, drafting)
    ]
    assert bits(outputs[0]) == bits(outputs[1])
    stored = load_file(tmp_path / "mtp.safetensors")
    (shard,) = gguf_weight_files([path])
    assert {name for name in shard.views if name.startswith("mtp.")} == set(stored)
    for name, tensor in stored.items():
        # Norms are stored as 1 + w, which rounds.
        torch.testing.assert_close(shard.read(name, FLOAT_DTYPES), tensor, rtol=0, atol=1e-6)


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of a folder's byte-level tokenizer."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in raw["added_tokens"]}
    ids = raw["model"]["vocab"] | {content: token["id"] for content, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": [
            1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens
        ],
        "ggml.merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "ggml.eos_token_id": ids[config["eos_token"]],
        "chat_template": config["chat_template"],
    }


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a GGUF file that has a tokenizer, and that tokenizer's files."""
    folder = tmp_path_factory.mktemp("text")
    make_folder(folder)
    metadata = tokenizer_metadata(folder)
    size = {"vocab_size": len(metadata["ggml.tokens"]), "num_hidden_layers": 1}
    random_oracle(folder, "Qwen3", {**QWEN3, "hidden_size": 64}, **size)
    write_gguf(folder, folder / "model.gguf", lambda name: "Q8_0", metadata)
    return folder


def test_gguf_chat_uses_its_tokenizer_and_template(with_text: Path) -> None:
    llm = LLM(str(with_text / "model.gguf"), max_model_len=512, quantization="gguf")
    mine = Tokenizer(with_text)
    tokenizer = llm.tokenizer
    for text in ("the quick brown fox", "<|im_start|>user\n<think>naïve café</think>"):
        assert tokenizer.encode(text) == mine.encode(text)
    assert {mine.token(i) for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    requested = [{"role": "user", "content": "fox"}]
    output = llm.chat(requested, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) >= 1
    assert tokenizer.decode(output.prompt_token_ids, False).startswith("<|im_start|>user\nfox")
    assert "gguf-Q8_0" in llm.engine.plan.numerics


@pytest.mark.parametrize("chosen", ["int8", "int4", "fp8"])
def test_gguf_weights_can_be_requantized(chosen: str, with_text: Path) -> None:
    llm = make_llm(with_text / "model.gguf", quantization=chosen)
    assert f"+{chosen}" in llm.engine.plan.numerics
    assert len(generate_greedy(llm, [1, 2, 3], 4).outputs[0].token_ids) == 4


def test_other_weight_format_is_refused_for_gguf(with_text: Path) -> None:
    with pytest.raises(ConfigError, match="quantization='awq' is not allowed; allowed: 'gguf'"):
        make_llm(with_text / "model.gguf", quantization="awq")


def test_gguf_settings_are_read_in_fake_mode(tmp_path: Path) -> None:
    """`explain --arch` builds models so; the scaling of positions is stored in a tensor."""
    random_oracle(tmp_path, "Llama", LLAMA)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    with FakeTensorMode():
        (shard,) = gguf_weight_files([tmp_path / "model.gguf"])
    assert "model.layers.0.self_attn.q_proj.weight" in shard.views
