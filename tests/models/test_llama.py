"""Llama 3 equals transformers for every type of position scaling, with and without biases."""

from typing import Any

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models.llama import Config
from lockstep.models.loader import build_model
from tests.models.dense import prompts, random_pair
from tests.models.oracle import RELATIVE, compare_greedy, logits_error
from tests.tiny_model import LLAMA

SHORT_HEAD = 4
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA["rope_scaling"], "original_max_position_embeddings": 64},  # type: ignore[dict-item]
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * SHORT_HEAD,
        "long_factor": [1.0, 1.5, 3.0, 8.0],
        "original_max_position_embeddings": 8,
    },
}
LLAMA_8B = {
    **LLAMA,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.fixture(scope="module", params=[*ROPES, "biases"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (engine, oracle)."""
    mine = {name: value for name, value in LLAMA.items() if not name.startswith("rope")}
    biases = {"attention_bias": True, "mlp_bias": True} if request.param == "biases" else {}
    rope = {"rope_theta": 5e3, **ROPES.get(request.param, ROPES["llama3"])}
    folder = tmp_path_factory.mktemp("llama")
    return random_pair(folder, "Llama", mine, rope_parameters=rope, **biases)


@pytest.mark.default_cases("dynamic", "yarn", "longrope")
def test_equals_transformers(pair) -> None:
    for ids in prompts(3, 200):
        assert logits_error(*pair, ids) < RELATIVE
        compare_greedy(*pair, ids, 12)


def test_llama_8b_shapes_and_parameters() -> None:
    build = BuildContext("cpu", torch.bfloat16, 1, 64)
    model: Any = build_model({**LLAMA_8B, "num_hidden_layers": 1, "vocab_size": 256}, build)
    table = model.weights()
    layer = {n.removeprefix("layers.0."): t for n, t in table.items() if n.startswith("layers.")}
    assert {n: tuple(t.shape) for n, t in layer.items()} == {
        "input_layernorm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "mlp.gate_proj.weight": (14336, 4096),
        "mlp.up_proj.weight": (14336, 4096),
        "mlp.down_proj.weight": (4096, 14336),
    }
    total = 32 * sum(t.numel() for t in layer.values()) + 2 * 128256 * 4096 + 4096
    assert total == 8_030_261_248


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"attention_bias": "yes"}, "attention_bias='yes'.*bool"),
        ({"mlp_bias": 1}, "mlp_bias=1.*bool"),
        ({"pretraining_tp": 2}, "pretraining_tp=2.*1"),
        ({"hidden_size": 4100}, "hidden_size=4100.*multiples of num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32.*multiples"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling.rope_type='su'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "no rope_parameters.low_freq_factor"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.read({**LLAMA_8B, **changes})
