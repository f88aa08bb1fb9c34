"""Rotary frequencies, and the ways in which checkpoints stretch them to longer contexts.

Without scaling, pair j of a head's first `width` dims rotates by theta^(-2j / width) radians per
token. Each kind of scaling is a class: it reads its settings from config.json and returns the
inverse frequencies and a factor for cos and sin. They are chosen once, when the model is built, for
its longest sequence (max_model_len): a token's bits must not depend on how long its request gets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from lockstep.layers.build_context import BuildContext
from lockstep.layers.rotary import Rotary
from lockstep.models.config_overrides import FULL_ATTENTION, ROPE_OUTSIDE
from lockstep.models.config_reader import MAX_SIZE, ConfigReader


@dataclass(frozen=True)
class Rope:
    """Rotary positions without scaling: "default"."""

    theta: float
    width: int

    @classmethod
    def read(cls, rope: ConfigReader, theta: float, width: int, trained: int) -> "Rope":
        """Read the rotary settings.

        trained: number of positions of the training, where the settings do not name it.
        """
        return cls(theta, width)

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return inverse frequencies [width / 2] fp64 in radians per token, and the factor of cos
        and sin.

        length: longest sequence.
        """
        return inverse_frequencies(self.theta, self.width), 1.0

    def rotary(self, build: BuildContext) -> Rotary:
        """Build the tables of cos and sin."""
        return Rotary(build, *self.frequencies(build.max_model_len))


def inverse_frequencies(theta: float, width: int) -> Tensor:
    """Return theta^(-2j / width) of each pair j: [width / 2] fp64."""
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


@dataclass(frozen=True)
class LinearRope(Rope):
    """Positions divided by a factor: "linear" (Chen et al., 2023)."""

    factor: float

    @classmethod
    def read(cls, rope: ConfigReader, theta: float, width: int, trained: int) -> "LinearRope":
        return cls(theta, width, rope.positive("factor"))

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        return inverse_frequencies(self.theta, self.width) / self.factor, 1.0


@dataclass(frozen=True)
class DynamicRope(Rope):
    """A larger theta for longer sequences: "dynamic" NTK (bloc97 and emozilla, 2023).

    transformers moves theta as a sequence grows past the trained positions, which changes what its
    first tokens were computed with. Here theta is that of max_model_len, from the first token on;
    up to the trained positions it is the model's own, as there.
    """

    factor: float
    trained: int

    @classmethod
    def read(cls, rope: ConfigReader, theta: float, width: int, trained: int) -> "DynamicRope":
        rope.need(width > 2, "partial_rotary_factor", "shares that rotate more than one pair")
        return cls(theta, width, rope.positive("factor"), trained)

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        beyond = max(length, self.trained) / self.trained - 1
        stretch = 1 + self.factor * beyond
        # The exponent keeps the fastest pair and slows the slowest one by the full factor.
        theta = self.theta * stretch ** (self.width / (self.width - 2))
        return inverse_frequencies(theta, self.width), 1.0


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Frequencies scaled by wavelength: "llama3" (Llama 3.1).

    Pairs that rotate fewer than `low` times over the trained positions are divided by `factor`,
    those that rotate more than `high` times are unchanged, and those between are interpolated.
    """

    factor: float
    low: float
    high: float
    trained: int

    @classmethod
    def read(cls, rope: ConfigReader, theta: float, width: int, trained: int) -> "Llama3Rope":
        low = rope.positive("low_freq_factor")
        high = rope.positive("high_freq_factor")
        rope.need(high > low, "high_freq_factor", "numbers above low_freq_factor")
        return cls(theta, width, rope.positive("factor"), low, high, _trained(rope, trained))

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        inverse = inverse_frequencies(self.theta, self.width)
        rotations = self.trained * inverse / (2 * pi)
        fast = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return inverse * fast + inverse / self.factor * (1 - fast), 1.0


@dataclass(frozen=True)
class YarnRope(Rope):
    """Frequencies interpolated by the index of the pair: "yarn" (Peng et al., YaRN, 2023).

    Pairs that rotate more than beta_fast times over the trained positions are unchanged, those that
    rotate fewer than beta_slow times are divided by factor, and those between are interpolated.
    attention_factor multiplies cos and sin. score_factor multiplies the scores of multi-head latent
    attention (mscale_all_dim, default 1).
    """

    factor: float
    trained: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    score_factor: float = 1.0

    @classmethod
    def read(cls, rope: ConfigReader, theta: float, width: int, trained: int) -> "YarnRope":
        rope.need(theta > 1, "rope_theta", "numbers above 1 with this rope_type")
        original = _trained(rope, trained)
        factor = _factor(rope, trained)
        # Factors of the paper's code. vLLM follows them and transformers does not.
        for name in ("attn_factor", "extrapolation_factor"):
            rope.one_of(name, 1, 1.0, default=1)
        # 0 counts as absent, as in transformers.
        mscale = rope.get("mscale", float, 0.0)
        mscale_all_dim = rope.get("mscale_all_dim", float, 0.0)
        suggested = _yarn_scale(factor, 1.0)
        if mscale and mscale_all_dim:
            suggested = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
        return cls(
            theta,
            width,
            factor,
            original,
            rope.positive("attention_factor", suggested),
            rope.positive("beta_fast", 32.0),
            rope.positive("beta_slow", 1.0),
            rope.get("truncate", bool, True),
            _yarn_scale(factor, mscale_all_dim) ** 2,
        )

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        inverse = inverse_frequencies(self.theta, self.width)
        first = self._pair(self.beta_fast)
        last = self._pair(self.beta_slow)
        if self.truncate:
            first = floor(first)
            last = ceil(last)
        first = max(first, 0)
        last = min(last, self.width - 1)
        if first == last:
            last += 0.001  # as in transformers: no division by zero
        pairs = torch.arange(self.width // 2, dtype=torch.float64)
        slow = ((pairs - first) / (last - first)).clamp(0, 1)
        return inverse / self.factor * slow + inverse * (1 - slow), self.attention_factor

    def _pair(self, rotations: float) -> float:
        """Return the (fractional) pair that rotates this often over the trained positions."""
        return self.width * log(self.trained / (rotations * 2 * pi)) / (2 * log(self.theta))


def _yarn_scale(factor: float, mscale: float) -> float:
    """Return the paper's attention factor: 0.1 mscale ln(factor) + 1, or 1 without stretching."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


@dataclass(frozen=True)
class LongRope(Rope):
    """Frequencies divided by a list: "longrope" (Ding et al., LongRoPE, 2024).

    There are two lists; transformers switches to the long one as soon as a sequence outgrows the
    trained positions. Here max_model_len decides, as in vLLM: the long list if it exceeds them.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    attention_factor: float

    @classmethod
    def read(cls, rope: ConfigReader, theta: float, width: int, trained: int) -> "LongRope":
        original = _trained(rope, trained)
        factor = _factor(rope, trained)
        suggested = 1.0
        if factor > 1:
            rope.need(original > 1, "original_max_position_embeddings", "2 or more")
            suggested = sqrt(1 + log(factor) / log(original))
        return cls(
            theta,
            width,
            rope.numbers("short_factor", width // 2),
            rope.numbers("long_factor", width // 2),
            original,
            rope.positive("attention_factor", suggested),
        )

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        divisors = torch.tensor(self.long if length > self.trained else self.short)
        inverse = inverse_frequencies(self.theta, self.width)
        return inverse / divisors.double(), self.attention_factor


KINDS: Mapping[str, type[Rope]] = {
    "default": Rope,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}
"""Class of each rope_type."""


WITHOUT_EFFECT = {
    "mrope_section": "all position rows of text are equal",
    "mrope_interleaved": "all position rows of text are equal",
    "original_max_position_embeddings": "the kinds that scale by it read it",
    "mscale_all_dim": "of latent attention, which reads it",
    "finetuned": "a note of how the model was trained",
}
"""Rotary settings that may be ignored, each with the reason."""


def read_rope(c: ConfigReader, head_dim: int, partial: float, theta: float | None = None) -> Rope:
    """Read the rotary settings of config.json.

    Args:
        partial: default share of a head's dims with positions.
        theta: default of rope_theta; None if the file must have it.

    Raises:
        CheckpointError: a kind of scaling is not supported, or a setting is unknown to it.
    """
    rope = _settings(c, {"rope_theta": theta})
    share = rope.get("partial_rotary_factor", float, partial)
    rope.need(0 < share <= 1, "partial_rotary_factor", "shares above 0, up to 1")
    width = int(head_dim * share)
    even = 0 < width <= head_dim and width % 2 == 0
    rope.need(even, "partial_rotary_factor", f"shares of {head_dim} that are even and not 0")
    base = rope.positive("rope_theta")
    kind = KINDS[rope.get("rope_type", str, "default")]
    built = kind.read(rope, base, width, c.size("max_position_embeddings"))
    rope.refuse_unread(WITHOUT_EFFECT)
    return built


def longest_sequence(c: ConfigReader) -> int:
    """Return the number of positions that the model serves, by max_position_embeddings and scaling.

    YaRN reaches factor times the positions that the model was trained on; "linear" and "dynamic"
    reach factor times max_position_embeddings, as in vLLM. Other kinds count them already.

    Raises:
        CheckpointError: a setting is missing or wrong.
    """
    positions = c.size("max_position_embeddings")
    c.need(positions > 1, "max_position_embeddings", "2 or more")
    rope = _settings(c, {})
    kind = rope.get("rope_type", str, "default")
    if kind == "yarn":
        reach = _factor(rope, positions) * _trained(rope, positions)
    elif kind in ("linear", "dynamic"):
        reach = rope.positive("factor") * positions
    else:
        reach = positions
    # A product such as 1.6 * 4096 is one token short where its float is rounded down.
    longest = max(positions, int(reach + 1e-6))
    rope.need(longest <= MAX_SIZE, "factor", f"numbers that lead to {MAX_SIZE} positions or fewer")
    return longest


def _settings(c: ConfigReader, defaults: Mapping[str, Any]) -> ConfigReader:
    """Return rope_parameters, or rope_scaling and top-level settings of older files.

    Args:
        defaults: values of settings that are absent everywhere.

    Raises:
        CheckpointError: the kind of scaling is not supported, or two places disagree.
    """
    values: dict[str, Any] = {name: c.raw.get(name) for name in ROPE_OUTSIDE}
    for part in ("rope_scaling", "rope_parameters"):
        inner = c.part(part)
        if FULL_ATTENTION in inner.raw:  # by the type of a layer; no other type here has positions
            inner = inner.part(FULL_ATTENTION)
        for name in ("rope_type", "type"):
            inner.one_of(name, *KINDS, default="default")
        for name, value in inner.raw.items():
            key = "rope_type" if name == "type" else name
            if values.get(key) not in (None, value):
                raise inner.error(name, value, f"{values[key]!r} as elsewhere in the file")
            values[key] = value
    present = {name: value for name, value in values.items() if value is not None}
    assumed = {name: value for name, value in defaults.items() if value is not None}
    return ConfigReader({**assumed, **present}, "rope_parameters.", c.file)


def _trained(rope: ConfigReader, longest: int) -> int:
    """Return the positions that the model was trained on before stretching to `longest`."""
    return rope.size("original_max_position_embeddings", longest)


def _factor(rope: ConfigReader, longest: int) -> float:
    """Return the stretching factor: the file's, or longest / original positions."""
    if "original_max_position_embeddings" not in rope.raw:
        return rope.positive("factor")
    return rope.positive("factor", longest / _trained(rope, longest))
