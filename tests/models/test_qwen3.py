"""Dense Qwen3 equals transformers, has its shapes, and refuses unsupported settings."""

import json
from pathlib import Path

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models.loader import build_model
from lockstep.models.qwen3 import Config
from tests.models.dense import make_llm, prompts, random_pair
from tests.models.oracle import RELATIVE, compare_greedy, logits_error
from tests.tiny_model import QWEN3, make_model

QWEN3_8B = {
    **QWEN3,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (engine, oracle)."""
    changes = {"rope_theta": 50000.0, "tie_word_embeddings": request.param}
    return random_pair(tmp_path_factory.mktemp("qwen3"), "Qwen3", QWEN3, **changes)


@pytest.mark.default_cases("tied")
def test_equals_transformers(pair) -> None:
    for ids in prompts(4, 200):
        assert logits_error(*pair, ids) < RELATIVE
        compare_greedy(*pair, ids, 12)


@pytest.mark.slow
def test_64_prompts_equal_transformers(pair) -> None:
    worst = 0.0
    ties = 0
    for ids in prompts(64, 600):
        worst = max(worst, logits_error(*pair, ids))
        ties += compare_greedy(*pair, ids, 64)
    print(f"worst relative error {worst:.2e}, ties {ties}")
    assert worst < RELATIVE


@pytest.fixture(scope="module")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Qwen3 folder without weights."""
    return make_model(tmp_path_factory.mktemp("dummy") / "model", QWEN3)


def test_dense_model_has_no_state_slots(dummy: Path) -> None:
    llm = make_llm(dummy, load_format="dummy")
    assert llm.engine.plan.num_slots == 0 and llm.engine.scheduler.cache.state is None


def test_mtp_requires_a_module(dummy: Path) -> None:
    with pytest.raises(CheckpointError, match="has none"):
        make_llm(dummy, load_format="dummy", speculative_config={"method": "mtp"})


def test_qwen3_8b_shapes_and_parameters() -> None:
    build = BuildContext("cpu", torch.bfloat16, 1, 64)
    small = {**QWEN3_8B, "num_hidden_layers": 1, "vocab_size": 256}
    model = build_model(small, build)
    table = model.weights()
    layer = {n.removeprefix("layers.0."): t for n, t in table.items() if n.startswith("layers.")}
    assert {n: tuple(t.shape) for n, t in layer.items()} == {
        "input_layernorm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (12288, 4096),
        "mlp.up_proj.weight": (12288, 4096),
        "mlp.down_proj.weight": (4096, 12288),
    }
    rest = {n: tuple(t.shape) for n, t in table.items() if not n.startswith("layers.")}
    matrix = (256, 4096)
    assert rest == {
        "embed_tokens.weight": matrix, "lm_head.weight": matrix, "norm.weight": (4096,)
    }  # fmt: skip
    total = 36 * sum(t.numel() for t in layer.values()) + 2 * 151936 * 4096 + 4096
    assert total == 8_190_735_360


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"] * 36}, "layer_types='?.*full_attention"),
        ({"layer_types": ["full_attention"] * 35}, "one for each of 36 layers"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope_scaling.rope_type='su'"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_scaling.type='mrope'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta=10000.0.*1000000"),
        ({"rope_theta": None}, "rope_theta"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32.*multiples"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0.*1 or more"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.read({**QWEN3_8B, **changes})


@pytest.mark.parametrize("name", ["hidden_size", "num_key_value_heads", "rms_norm_eps"])
def test_missing_setting_raises(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"has no {name}"):
        Config.read({k: v for k, v in QWEN3_8B.items() if k != name})


def test_rope_parameters_equal_older_settings() -> None:
    new = {k: v for k, v in QWEN3_8B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert Config.read(json.loads(json.dumps(new))) == Config.read(QWEN3_8B)
