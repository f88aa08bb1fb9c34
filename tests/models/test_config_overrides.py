"""hf_overrides change a setting in every style of config.json."""

from typing import Any

import pytest

from lockstep import EngineConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.config_overrides import overridden
from lockstep.models.config_reader import ConfigReader
from lockstep.models.rope import LinearRope, Rope, YarnRope, read_rope
from lockstep.worker.build import pick_length

POSITIONS = 2048
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}
OLDER_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}
NEWER = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
STYLES: dict[str, dict[str, Any]] = {
    "newer": NEWER,
    "older": {"rope_theta": 5e4, "rope_scaling": None},
    "older, scaled": {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "bare": {"rope_theta": 5e4},
    "by layer type": {"rope_parameters": {"full_attention": NEWER["rope_parameters"]}},
}
CHANGES: dict[str, dict[str, Any]] = {
    "newer": {"rope_parameters": YARN},
    "older": {"rope_scaling": OLDER_YARN},
    "by layer type": {"rope_parameters": {"full_attention": YARN}},
    "without the original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}


def config(style: str, nested: bool) -> dict[str, Any]:
    """Return a config.json of this style; nested: within text_config."""
    settings = {"max_position_embeddings": POSITIONS, **STYLES[style]}
    return {"model_type": "qwen3_5", "text_config": settings} if nested else settings


def rope_of(raw: dict[str, Any]) -> Rope:
    return read_rope(ConfigReader(raw), 64, 1.0)


@pytest.mark.parametrize("nesting", ["flat", "nested", "nested, named"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("style", STYLES)
def test_yarn_override_in_every_style(style: str, change: str, nesting: str) -> None:
    expected = CHANGES[change]
    changes = {"text_config": expected} if nesting == "nested, named" else expected
    raw = overridden(config(style, nesting != "flat"), changes)
    rope = rope_of(raw)
    assert isinstance(rope, YarnRope)
    assert (rope.theta, rope.factor, rope.trained) == (5e4, 4.0, POSITIONS)
    assert pick_length(EngineConfig(), raw) == 4 * POSITIONS
    assert pick_length(EngineConfig(max_model_len=4 * POSITIONS), raw) == 4 * POSITIONS
    with pytest.raises(ConfigError, match=f"2 to {4 * POSITIONS} .*hf_overrides"):
        pick_length(EngineConfig(max_model_len=4 * POSITIONS + 1), raw)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_rope_theta_override_in_every_style(style: str, nested: bool) -> None:
    assert rope_of(overridden(config(style, nested), {"rope_theta": 7.0})).theta == 7.0


def test_override_removes_scaling() -> None:
    rope = rope_of(overridden(config("older, scaled", False), {"rope_scaling": None}))
    assert type(rope) is Rope and rope.theta == 5e4
    assert type(rope_of(config("older, scaled", False))) is LinearRope


def test_override_of_text_config_keeps_other_settings() -> None:
    raw = {"model_type": "qwen3_5", "vocab_size": 5, "text_config": {"head_dim": 4, "x": {"a": 1}}}
    actual = overridden(raw, {"head_dim": 8, "x": {"b": 2}, "model_type": "other", "new": 1})
    assert actual["text_config"] == {"head_dim": 8, "x": {"a": 1, "b": 2}}
    assert actual["model_type"] == "other" and actual["new"] == 1 and actual["vocab_size"] == 5
    inner = overridden(raw, {"head_dim": 8, "text_config": {"head_dim": 16}})["text_config"]
    assert inner["head_dim"] == 16
    assert raw["text_config"] == {"head_dim": 4, "x": {"a": 1}}


@pytest.mark.parametrize("wrong", ["yarn", ["yarn"], 4])
def test_scaling_must_be_an_object(wrong: Any) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(CheckpointError, match=f"{name}="):
            rope_of(overridden(config("newer", False), {name: wrong}))


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 3.0}, 3 * 2048),
        ({"rope_type": "dynamic", "factor": 2.5}, 5120),
        ({"rope_type": "yarn", "factor": 1.6, "original_max_position_embeddings": 4096}, 6553),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            2048,
        ),
    ],
)
def test_max_model_len_follows_rope_scaling(scaling: dict[str, Any], length: int) -> None:
    raw = {"max_position_embeddings": 2048, "rope_theta": 5e4, "rope_scaling": scaling}
    assert pick_length(EngineConfig(), raw) == length


def test_absurd_scaling_factor_is_refused() -> None:
    raw = {"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 1e12}}
    with pytest.raises(CheckpointError, match="factor="):
        pick_length(EngineConfig(), raw)
