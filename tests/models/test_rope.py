"""Rotary frequencies of every type of scaling equal those of transformers, and their settings are
read strictly."""

from typing import Any

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models.config_reader import ConfigReader
from lockstep.models.rope import KINDS, Rope, read_rope

HEAD_DIM = 64
TRAINED = 512
LONGEST = 2048
SHORT = [1.0 + 0.01 * pair for pair in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.2 * pair for pair in range(HEAD_DIM // 2)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": TRAINED,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 24, "beta_slow": 2.0, "attention_factor": 0.9},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "factor": 40.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, half a head": {**YARN, "partial_rotary_factor": 0.5},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 8.0},
    "longrope, attention_factor": {**LONGROPE, "attention_factor": 1.3},
}
LENGTHS = [100, TRAINED, TRAINED + 1, LONGEST, 3 * LONGEST]


def config(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the relevant part of a config.json."""
    rope = {"rope_theta": 50000.0, **parameters}
    return {"max_position_embeddings": LONGEST, "rope_parameters": rope}


def rope_of(raw: dict[str, Any]) -> Rope:
    return read_rope(ConfigReader(raw), HEAD_DIM, 1.0)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SETTINGS)
def test_rope_frequencies_equal_transformers(name: str, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = config(SETTINGS[name])
    theirs = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, **raw
    )
    kind = SETTINGS[name]["rope_type"]
    if kind == "default":
        expected = (50000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0)
    else:
        expected = ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=length)
    inverse, factor = rope_of(raw).frequencies(length)
    torch.testing.assert_close(inverse.float(), expected[0], rtol=2e-6, atol=0)
    assert factor == pytest.approx(expected[1], rel=1e-12)


def test_every_rope_type_is_compared() -> None:
    assert {settings["rope_type"] for settings in SETTINGS.values()} == set(KINDS)


def test_dynamic_scaling_is_inactive_within_trained_positions() -> None:
    plain = rope_of(config(SETTINGS["default"])).frequencies(LONGEST)[0]
    assert torch.equal(rope_of(config(SETTINGS["dynamic"])).frequencies(LONGEST)[0], plain)


@pytest.mark.parametrize("name", ["llama3", "yarn", "longrope"])
def test_older_rope_settings(name: str) -> None:
    """rope_scaling with `type`, and theta and the original positions at the top level."""
    scaling = dict(SETTINGS[name])
    scaling["type"] = scaling.pop("rope_type")
    top = {"original_max_position_embeddings": scaling.pop("original_max_position_embeddings")}
    older = {"max_position_embeddings": LONGEST, "rope_theta": 50000.0, "rope_scaling": scaling}
    assert rope_of({**older, **top}) == rope_of(config(SETTINGS[name]))


def test_factors_of_yarn_that_change_nothing_are_allowed() -> None:
    """Checkpoints that were extended by other tools name them.

    https://github.com/unslothai/unsloth/issues/2984
    """
    named = {"attn_factor": 1.0, "extrapolation_factor": 1}
    assert rope_of(config({**YARN, **named})) == rope_of(config(YARN))
    for name in named:
        with pytest.raises(CheckpointError, match=f"{name}=1.2.*allowed: 1"):
            rope_of(config({**YARN, name: 1.2}))
        with pytest.raises(CheckpointError, match=name):
            rope_of(config({**SETTINGS["linear"], name: 1.2}))


def test_longrope_factors_follow_max_model_len() -> None:
    rope = rope_of(config(LONGROPE))
    tables = []
    for length in (TRAINED, TRAINED + 1):
        build = BuildContext("cpu", torch.float32, 1, LONGEST, max_model_len=length)
        tables.append(rope.rotary(build))
    for table, divisors in zip(tables, (SHORT, LONG), strict=True):
        inverse, factor = rope.frequencies(TRAINED + (divisors is LONG))
        angles = 700 * inverse
        torch.testing.assert_close(
            table.cos[700].double(), angles.cos() * factor, atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            table.sin[700].double(), angles.sin() * factor, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "su"}, "rope_parameters.rope_type='su'.*'longrope'"),
        ({"rope_type": ["yarn"]}, "rope_parameters.rope_type="),
        ({"rope_type": "linear"}, "no rope_parameters.factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor=-1.0.*above 0"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "type='yarn'.*'linear' as else"),
        ({"rope_type": "dynamic", "factor": "2"}, "factor='2'.*float"),
        ({"rope_type": "dynamic", "factor": 2, "partial_rotary_factor": 0.04}, "more than one"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0.*above low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": None}, "no rope_parameters.low_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_.*1 or more"),
        ({"rope_type": "yarn"}, "no rope_parameters.factor"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta=1.0.*above 1"),
        ({**YARN, "truncate": 1}, "truncate=1.*bool"),
        ({**LONGROPE, "short_factor": SHORT[1:]}, "short_factor=.*32 finite numbers above 0"),
        ({**LONGROPE, "long_factor": [*LONG[1:], 0.0]}, "long_factor=.*32 finite numbers"),
        ({**LONGROPE, "long_factor": [*LONG[1:], True]}, "long_factor=.*32 finite numbers"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "original_max_.*2 or more"),
    ],
)
def test_invalid_rope_settings_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_of(config(parameters))
