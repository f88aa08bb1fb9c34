"""AWQ (Lin et al., 2023), as AutoAWQ writes it for its "gemm" kernel: 4 bits.

    qweight [K, N / 8] int32    8 codes of neighbouring outputs, in the nibble order of ORDER
    qzeros  [G, N / 8] int32    8 zero points of neighbouring outputs, in the same order
    scales  [G, N]              fp16, bf16 or fp32
    W[n, k] = (code - zero) * scale

The activation scales that AWQ searches for are already folded into the preceding weights.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import IntWeight
from lockstep.quantization.integers import (
    GROUPS,
    WORD,
    IntWeightFormat,
    ModuleScheme,
    Scheme,
    fill_scales,
    fill_words,
    fill_zeros,
    unpack_words,
)
from lockstep.quantization.settings_reader import SETTINGS_PREFIX, SettingsReader, read_strictly
from lockstep.quantization.weight_format import (
    CheckpointLinear,
    WeightFormat,
    is_usually_unquantized,
)
from lockstep.quantization.weight_sink import WeightSink

AWQ_BITS = 4
CODES = WORD // AWQ_BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output column in each nibble of a word, lowest nibble first.

Outputs 2i and 2i + 1 are 16 bits apart, so that one AND extracts both into a pair of halves.
"""
SHIFTS = tuple(AWQ_BITS * ORDER.index(output) for output in range(CODES))
"""First bit of each output column in a word."""


class AWQ(IntWeightFormat):
    """AWQ weight format.

    excluded: pattern that matches anywhere in the names of unquantized modules, or None. head:
    whether lm_head is quantized.
    """

    def __init__(self, c: SettingsReader) -> None:
        scheme = Scheme(
            bits=c.one_of(c.present_name("bits", "w_bit"), AWQ_BITS),
            group=c.one_of(c.present_name("group_size", "q_group_size"), *GROUPS, default=128),
            symmetric=not c.get("zero_point", bool, True),
        )
        super().__init__("awq", scheme)
        version = c.present_name("version", "checkpoint_format", "format")
        c.one_of(version, "gemm", "GEMM", default="gemm")
        c.one_of("pack_dtype", "int32", default="int32")
        listed = c.names("modules_to_not_convert")
        # AutoAWQ looks for an entry anywhere in a name.
        self.excluded = re.compile("|".join(map(re.escape, listed))) if listed else None
        self.head = c.get("lm_head", bool, False)

    def module_scheme(self, module: CheckpointLinear) -> ModuleScheme:
        pattern = self.excluded
        parts = (pattern.search(name) for name in module.names if pattern is not None)
        part = next((part[0] for part in parts if part is not None), None)
        if part is not None:
            setting = f"{SETTINGS_PREFIX}modules_to_not_convert[{part[:100]!r}]"
            return ModuleScheme(self.scheme, False, setting)
        head = module.path == "lm_head"
        return ModuleScheme(self.scheme, self.head if head else not is_usually_unquantized(module))

    def weight_sinks(
        self, module: CheckpointLinear, weight: IntWeight, scheme: Scheme
    ) -> dict[str, WeightSink]:
        return awq_sinks(module, weight)


def read(settings: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format of a checkpoint's settings.

    Raises:
        CheckpointError: a setting is not supported.
    """
    return read_strictly(settings, "awq", AWQ)


def awq_sinks(module: CheckpointLinear, weight: IntWeight) -> dict[str, WeightSink]:
    """Return the sinks of a module's tensors."""
    n = module.whole_outputs
    groups = weight.scales.shape[1]
    words = -(-n // CODES)
    int32 = (torch.int32,)
    where = weight.device
    scales = partial(fill_scales, module, weight)
    return {
        "qweight": WeightSink(
            (module.inputs, words), int32, where, partial(_fill_codes, weight), 1, CODES
        ),
        "qzeros": WeightSink(
            (groups, words), int32, where, partial(_fill_zeros, module, weight), 1, CODES
        ),
        "scales": WeightSink((groups, n), (weight.scales.dtype,), where, scales, 1),
    }


def _fill_codes(weight: IntWeight, words: Tensor) -> None:
    """Fill the codes from words [K, N / 8]."""

    def codes(begin: int, end: int) -> Tensor:
        part = words[:, begin // CODES : -(-end // CODES)]
        return unpack_words(part, SHIFTS, AWQ_BITS, dim=1)[:, : end - begin].t()

    fill_words(weight, CODES, codes)


def _fill_zeros(module: CheckpointLinear, weight: IntWeight, words: Tensor) -> None:
    """Fill the zero points from words [G, N / 8]."""
    zeros = unpack_words(words, SHIFTS, AWQ_BITS, dim=1)
    fill_zeros(module, weight, zeros[:, : module.outputs])
