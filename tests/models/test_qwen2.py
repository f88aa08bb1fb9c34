"""Qwen2.5 equals transformers, has its shapes, and refuses unsupported settings."""

from typing import Any

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models.loader import build_model
from lockstep.models.qwen2 import Config
from tests.models.dense import prompts, random_pair
from tests.models.oracle import RELATIVE, compare_greedy, logits_error
from tests.tiny_model import QWEN2

QWEN2_7B = {
    **QWEN2,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (engine, oracle)."""
    changes = {"rope_theta": 50000.0, "tie_word_embeddings": request.param}
    return random_pair(tmp_path_factory.mktemp("qwen2"), "Qwen2", QWEN2, **changes)


@pytest.mark.default_cases("tied")
def test_equals_transformers(pair) -> None:
    for ids in prompts(4, 200):
        assert logits_error(*pair, ids) < RELATIVE
        compare_greedy(*pair, ids, 12)


def test_qwen2_7b_shapes_and_parameters() -> None:
    build = BuildContext("cpu", torch.bfloat16, 1, 64)
    model: Any = build_model({**QWEN2_7B, "num_hidden_layers": 1, "vocab_size": 256}, build)
    table = model.weights()
    layer = {n.removeprefix("layers.0."): t for n, t in table.items() if n.startswith("layers.")}
    assert {n: tuple(t.shape) for n, t in layer.items()} == {
        "input_layernorm.weight": (3584,),
        "post_attention_layernorm.weight": (3584,),
        "self_attn.q_proj.weight": (3584, 3584),
        "self_attn.q_proj.bias": (3584,),
        "self_attn.k_proj.weight": (512, 3584),
        "self_attn.k_proj.bias": (512,),
        "self_attn.v_proj.weight": (512, 3584),
        "self_attn.v_proj.bias": (512,),
        "self_attn.o_proj.weight": (3584, 3584),
        "mlp.gate_proj.weight": (18944, 3584),
        "mlp.up_proj.weight": (18944, 3584),
        "mlp.down_proj.weight": (3584, 18944),
    }
    total = 28 * sum(t.numel() for t in layer.values()) + 2 * 152064 * 3584 + 3584
    assert total == 7_615_616_512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types='?.*full_attention"),
        ({"layer_types": ["full_attention"] * 27}, "one for each of 28 layers"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.type='mrope'"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.read({**QWEN2_7B, **changes})
