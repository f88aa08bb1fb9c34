"""Cache bytes of published models: the table of docs/models.md equals the values computed from
their dimensions."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import KIMI_K2
from lockstep.cache.specs import StorageKind, unit_bytes
from lockstep.layers.build_context import BuildContext
from lockstep.models import architecture
from lockstep.worker.memory import mixers
from tests.bench.test_floor import LARGE_CONFIG, MIXTURE_CONFIG
from tests.models.test_deepseek_v3 import REAL
from tests.models.test_llama import LLAMA_8B
from tests.models.test_nemotron_h import NANO_9B, SUPER
from tests.models.test_qwen2 import QWEN2_7B
from tests.models.test_qwen3 import QWEN3_8B
from tests.selection import some_slow
from tests.tiny_model import CONFIG, HYBRID_MOE, MIXTRAL, NEXT, QWEN3_MOE

PAGE = Path(__file__).parents[2] / "docs/models.md"
ROW = re.compile(r"^\| ([^|]+) \| ([\d,]+) \| ([\d.]+|-) \|$", re.MULTILINE)
RAW_INPUTS = 3
"""Raw inputs of a convolution over four tokens that the next token needs."""
NANO_30B = {
    **{name: value for name, value in SUPER.items() if name != "moe_latent_size"},
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
}
NEXT_80B = {
    **NEXT,
    **MIXTURE_CONFIG,
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
}
QWEN3_30B = {
    **QWEN3_MOE,
    "head_dim": 128,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    **MIXTRAL,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-27B, Qwen3.6-27B": {**CONFIG, **LARGE_CONFIG},
    "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B": {**HYBRID_MOE, **MIXTURE_CONFIG},
    "Qwen3-Next-80B-A3B": NEXT_80B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen2.5-7B": QWEN2_7B,
    "Llama-3.1-8B": LLAMA_8B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "DeepSeek-V3, R1": REAL,
    "Kimi-K2": KIMI_K2,
    "Nemotron 3 Nano 30B-A3B": NANO_30B,
    "Nemotron 3 Super 120B-A12B": SUPER,
    "Nemotron Nano 9B v2": NANO_9B,
}
DEFAULT_MODELS = ("Qwen3-Next-80B-A3B", "Qwen3-8B", "DeepSeek-V3, R1", "Nemotron 3 Nano 30B-A3B")
"""Models of the default run: a hybrid, one with keys and values, with latents, with Mamba-2."""


def documented_bytes() -> dict[str, tuple[int, float]]:
    """Return model -> (bytes per token, MiB per row) as in the page."""
    section = PAGE.read_text().partition("\n## Memory\n")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    return {
        name: (int(token.replace(",", "")), 0.0 if row == "-" else float(row))
        for name, token, row in rows
    }


def test_table_lists_all_models() -> None:
    assert set(documented_bytes()) == set(MODELS)


@pytest.mark.default_cases("Qwen3-8B", "Nemotron 3 Nano 30B-A3B")
@pytest.mark.parametrize("name", some_slow(MODELS, DEFAULT_MODELS))
def test_cache_bytes_per_token_and_row(name: str) -> None:
    raw = {**MODELS[name], "layer_types": None}
    built = architecture(raw["model_type"])
    with FakeTensorMode():
        build = BuildContext("cpu", torch.bfloat16, 1, 64)
        build.memory_budget.bounded = False
        model = built.Model(built.Config.read(raw), build)
    specs = [layer.cache_spec() for layer in mixers(model, None).values()]
    kept = [part for spec in specs for part in spec.parts if spec.kind is StorageKind.STATE]
    states = sum(p.nbytes for p in kept if p.name == "recurrent")
    raws = sum(p.nbytes // p.shape[0] * RAW_INPUTS for p in kept if p.name == "conv")
    token, row = documented_bytes()[name]
    assert unit_bytes(specs, StorageKind.PAGED, 1) == token
    assert round((states + raws) / 2**20, 1) == row
