"""Nemotron-H equals transformers with blocks of every kind, odd sizes, biases and latent
mixtures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep import LLM
from lockstep.bench.floor import sketch
from lockstep.cache.specs import StorageKind, unit_bytes
from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.layers.mamba2 import Mamba2
from lockstep.models import architecture
from lockstep.models.loader import build_model
from lockstep.worker.memory import mixers
from tests.models.dense import NGRAM, VOCAB, bits, generate_greedy, make_llm, prompts, random_oracle
from tests.models.oracle import RELATIVE, compare_tokens, logits_error
from tests.tiny_model import NEMOTRON_H

Base = dict[str, Any]
VARIANTS: dict[str, Base] = {
    "nano": {},
    "super": {
        "hybrid_override_pattern": "MEM*EME",
        "moe_latent_size": 18,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 80,
    },
    "dense": {
        "hybrid_override_pattern": "M-M*-",
        "num_attention_heads": 7,
        "head_dim": 64,
        "mamba_num_heads": 3,
        "mamba_head_dim": 40,
        "n_groups": 3,
        "ssm_state_size": 24,
        "tie_word_embeddings": True,
    },
    "biases": {
        "hybrid_override_pattern": "M*-EM",
        "mlp_bias": True,
        "use_bias": True,
        "use_conv_bias": False,
        "conv_kernel": 3,
        "moe_latent_size": 10,
        "norm_topk_prob": False,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
}


def oracle_of(folder: Path, **changes: Any) -> Any:
    """Return a random transformers model, with routers' correction biases."""
    base = {n: x for n, x in NEMOTRON_H.items() if n not in ("model_type", "torch_dtype")}
    oracle = random_oracle(folder, "NemotronH", base, **changes)
    draw = torch.Generator().manual_seed(3)
    for name, buffer in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.3)
    if oracle.config.tie_word_embeddings:  # transformers 5.23 leaves them apart
        oracle.lm_head.weight.data.copy_(oracle.model.embeddings.weight)
    oracle.save_pretrained(folder)
    return oracle


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return (folder, oracle)."""
    folder = tmp_path_factory.mktemp("nemotron")
    return folder, oracle_of(folder, **VARIANTS[request.param])


def engine(folder: Path, drafter: object = None, **settings: Any) -> LLM:
    return make_llm(folder, speculative_config=drafter, max_num_seqs=2, **settings)


@pytest.mark.default_cases("super")
def test_logits_equal_transformers_with_and_without_chunks(pair: Any) -> None:
    (folder, oracle) = pair
    engines = [engine(folder), engine(folder, max_num_batched_tokens=64)]
    for ids in prompts(3, 200):
        for llm in engines:
            assert logits_error(llm, oracle, ids) < RELATIVE


@pytest.mark.default_cases("dense")
def test_greedy_tokens_equal_transformers_with_and_without_drafts(pair: Any) -> None:
    (folder, oracle) = pair
    engines = [engine(folder, drafter) for drafter in (None, NGRAM)]
    for ids in prompts(2, 180):
        outputs = [generate_greedy(llm, ids, 12) for llm in engines]
        compare_tokens(oracle, ids, outputs[0].outputs[0].token_ids)
        assert bits(outputs[0]) == bits(outputs[1])


def test_block_pattern_equals_block_list() -> None:
    """Older files have a pattern, and transformers writes a list."""
    raw: Base = {**NEMOTRON_H, "vocab_size": VOCAB}
    pattern = raw.pop("hybrid_override_pattern")
    read = architecture("nemotron_h").Config.read
    plain = read({**raw, "hybrid_override_pattern": pattern})
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    later = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    for kinds in (names, later):
        blocks = [kinds[letter] for letter in pattern]
        assert read(raw | {"layers_block_type": blocks}) == plain
        assert read(raw | {"layer_types": blocks}) == plain


def test_older_setting_names_are_read() -> None:
    """transformers reads these names too; if both names are present, they must agree."""
    raw: Base = {**NEMOTRON_H, "vocab_size": VOCAB, "time_step_limit": [0.01, 0.5]}
    read = architecture("nemotron_h").Config.read
    later = {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
    }
    older = {name: value for name, value in raw.items() if name not in later.values()}
    older |= {name: raw[new] for name, new in later.items()}
    assert read(older) == read(raw) and read(raw).mamba.limits == (0.01, 0.5)
    assert read(raw | older) == read(raw)
    with pytest.raises(CheckpointError, match=r"mamba_dt_limit=\[0, 1\].*as time_step_limit has"):
        read({**raw, "mamba_dt_limit": [0, 1]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern='X'"),
        ({"hybrid_override_pattern": "MM-"}, "with a block of attention"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type.*the blocks of hybrid_"),
        (
            {
                "num_nextn_predict_layers": 1,
                "mtp_hybrid_override_pattern": "*E",
                "mtp_layers_block_type": ["attention", "mlp"],
            },
            "mtp_layers_block_type.*the blocks of mtp_hybrid",
        ),
        ({"num_hidden_layers": 4}, "num_hidden_layers=4.*9, the blocks"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'.*'relu2'"),
        ({"mamba_hidden_act": "relu"}, "mamba_hidden_act='relu'"),
        ({"mamba_num_heads": 5}, "mamba_num_heads=5.*multiples of n_groups"),
        ({"residual_in_fp32": True}, "residual_in_fp32=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"time_step_limit": [0.0, "x"]}, "time_step_limit"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype='bfloat16'"),
    ],
)
def test_unsupported_settings_are_refused(changes: Base, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        architecture("nemotron_h").Config.read({**NEMOTRON_H, "vocab_size": VOCAB, **changes})


def test_time_step_limits() -> None:
    raw = {**NEMOTRON_H, "vocab_size": VOCAB}
    read = architecture("nemotron_h").Config.read
    for limit in (float("inf"), {"__float__": "Infinity"}):
        config = read({**raw, "time_step_limit": [0.001, limit]})
        assert config.mamba.limits == (0.001, float("inf"))
    model: Any = build_model(
        {**raw, "time_step_limit": [0, 2]}, BuildContext("cpu", torch.float32, 1, 64)
    )
    assert model.blocks[0].mixer.limits == (0.0, 2.0)


def test_mamba2_projection_rows() -> None:
    """Nemotron 3 Nano: z 0 .. 4095, x, B and C 4096 .. 10239, dt 10240 .. 10303."""
    mixer = Mamba2(BuildContext("cpu", torch.bfloat16, 1, 64), 2688, 64, 64, 8, 128, 4, 1e-5)
    assert mixer.parts == (4096, 6144, 64)
    assert sum(mixer.parts) == 10304


@pytest.mark.slow
def test_undeclared_draft_module_is_not_read(tmp_path: Path) -> None:
    """config.json declares no module."""
    oracle_of(tmp_path)
    (prompt,) = prompts(1, 70)
    plain = bits(generate_greedy(engine(tmp_path), prompt, 8))
    save_file({"mtp.layers.0.enorm.weight": torch.ones(4)}, tmp_path / "mtp.safetensors")
    assert bits(generate_greedy(engine(tmp_path), prompt, 8)) == plain


COMMON = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "conv_kernel": 4,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
}
NANO_9B = {
    **COMMON,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
SUPER = {
    **COMMON,
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "n_routed_experts": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 22,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 5.0,
}
BIASES = 40 * 512
"""Correction biases of Super's routers, which are not part of its published count."""
MTP_OF_SUPER = 2_942_324_736
"""Parameters of its MTP module, which are part of its published count."""


@pytest.mark.default_cases("Nano 9B v2")
@pytest.mark.parametrize(
    ("raw", "parameters", "slot", "token"),
    [
        (NANO_9B, 8_888_227_328, 27 * (5_242_880 + 73_728), 16_384),
        (SUPER, 123_611_012_096 - MTP_OF_SUPER + BIASES, 40 * (4_194_304 + 61_440), 8_192),
    ],
    ids=["Nano 9B v2", "Super 120B"],
)
def test_parameters_and_cache_bytes_of_published_models(
    tmp_path: Path, raw: Base, parameters: int, slot: int, token: int
) -> None:
    """A slot has the state and three raw inputs, a page one token."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = sketch(tmp_path, torch.bfloat16, None).model
    assert sum(p.numel() for p in model.parameters()) == parameters
    specs = [layer.cache_spec() for layer in mixers(model, None).values()]
    kept = [part for spec in specs for part in spec.parts if spec.kind is StorageKind.STATE]
    states = sum(p.nbytes for p in kept if p.name == "recurrent")
    raws = sum(p.nbytes // p.shape[0] * 3 for p in kept if p.name == "conv")
    assert states + raws == slot
    assert unit_bytes(specs, StorageKind.PAGED, 1) == token
