"""GGUF files of every architecture: against transformers, and against the same weights in
safetensors, bit for bit."""

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


def inverse(order: Any) -> Any:
    """Return the permutation that undoes this one."""
    return np.argsort(order)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_a_quantized_file_has_the_bits_of_its_values_in_safetensors(
    kind: str, tmp_path: Path
) -> None:
    """Rows of q and k come back from llama.cpp's order; all else is as it was."""
    folder = tmp_path / "model"
    random_oracle(folder, "Llama", {**LLAMA, **WIDE, "head_dim": 16, "num_attention_heads": 4})
    tensors = write_gguf(folder, tmp_path / "model.gguf", lambda name: kind)
    number = GGMLQuantizationType[kind]
    values = {
        name: torch.from_numpy(quants.dequantize(quants.quantize(array, number), number).copy())
        for name, array in tensors.items()
        if array.ndim > 1
    }
    stored = load_file(folder / "model.safetensors")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        **{
            f"model.layers.{i}.{ours}.weight": f"blk.{i}.{theirs}.weight"
            for i in range(LLAMA["num_hidden_layers"])  # type: ignore[arg-type]
            for ours, theirs in {
                "self_attn.q_proj": "attn_q",
                "self_attn.k_proj": "attn_k",
                "self_attn.v_proj": "attn_v",
                "self_attn.o_proj": "attn_output",
                "mlp.gate_proj": "ffn_gate",
                "mlp.up_proj": "ffn_up",
                "mlp.down_proj": "ffn_down",
            }.items()
        },
    }
    assert set(names.values()) == set(values)
    for ours, theirs in names.items():
        weight = values[theirs]
        if "q_proj" in ours or "k_proj" in ours:
            # Where row r of the weight went, when it was written row by row.
            rows = np.arange(len(weight)).reshape(-1, 2, 8).swapaxes(1, 2).flatten()
            weight = weight[inverse(rows)]
        stored[ours] = weight.contiguous()
    save_file(stored, folder / "model.safetensors")
    ids = prompts(1, 60)[0]
    both = [ask(make_llm(one), ids, 12) for one in (tmp_path / "model.gguf", folder)]
    assert bits(both[0]) == bits(both[1])


@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
def test_the_draft_module_of_a_file_drafts(family: str, tmp_path: Path) -> None:
    (classes, base, centre) = FAMILIES[family]
    random_oracle(tmp_path, classes, of_transformers(base), centre)
    add_draft_module(tmp_path, told=True)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path)
    drafting = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    ids = prompts(1, 60)[0]
    plain, drafted, original = (
        make_llm(one, speculative_config=chosen)
        for one, chosen in ((path, None), (path, drafting), (tmp_path, drafting))
    )
    outputs = [ask(llm, ids, 24) for llm in (plain, drafted)]
    assert bits(outputs[0]) == bits(outputs[1])
    with torch.inference_mode():
        ours, theirs = (llm.engine.runner.draft for llm in (drafted, original))
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-5, atol=1e-5)
