"""GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel write it: 4 and 8 bits.

    qweight [K / c, N] int32    c = 32 / bits codes of one output along K, the lowest bits first
    qzeros  [G, N / c] int32    c zero points of neighbouring outputs
    scales  [G, N]              fp16, bf16 or fp32
    g_idx   [K] int32           the group of each column; absent or zeros: k // group
    W[n, k] = (code - zero) * scale

Version 2 stores the zero points. Version 1 subtracts 1 from each, but as one subtraction from the
whole word modulo 2^32 (0x11111111 for 4 bits), so a zero point of 0 borrows from the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import IntWeight
from lockstep.quantization.integers import (
    BITS,
    GROUPS,
    WORD,
    IntWeightFormat,
    ModuleScheme,
    Scheme,
    ascending,
    fill_scales,
    fill_words,
    fill_zeros,
    unpack_words,
)
from lockstep.quantization.settings_reader import (
    SETTINGS_PREFIX,
    NamePattern,
    SettingsReader,
    read_strictly,
)
from lockstep.quantization.weight_format import (
    CheckpointLinear,
    WeightFormat,
    damaged_error,
    is_usually_unquantized,
)
from lockstep.quantization.weight_sink import WeightSink

STORED_LESS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> offset subtracted from stored zero points."""


@dataclass(frozen=True)
class Rule:
    """Entry of `dynamic`.

    pattern: matched from the start of a module's full name. scheme: of the modules, None if they
    are not quantized.
    """

    text: str
    pattern: NamePattern
    scheme: Scheme | None


class GPTQ(IntWeightFormat):
    """GPTQ weight format. inside: names within a layer of quantized modules, empty for all."""

    def __init__(self, c: SettingsReader) -> None:
        scheme = Scheme(
            bits=c.one_of("bits", *BITS),
            group=c.one_of("group_size", *GROUPS, default=-1),
            symmetric=c.get("sym", bool, False),
            act_order=c.get("desc_act", bool, False),
            static=_static(c),
        )
        super().__init__("gptq", scheme)
        written = c.present_name("checkpoint_format", "format")
        self.stored_less = STORED_LESS[c.one_of(written, *STORED_LESS, default="gptq")]
        c.one_of("pack_dtype", "int32", default="int32")
        c.one_of("is_marlin_format", False, default=False)
        c.one_of("rotation", None)
        c.one_of("adapter", None)
        self.head = c.get("lm_head", bool, False)
        self.head_setting = f"{SETTINGS_PREFIX}lm_head={self.head}" if c.has("lm_head") else ""
        self.inside = c.names("modules_in_block_to_quantize")
        self.rules = [_rule(c, scheme, *entry) for entry in c.parts("dynamic").items()]

    def module_scheme(self, module: CheckpointLinear) -> ModuleScheme:
        scheme = self.scheme
        # The first rule that matches decides, as in GPTQModel.
        for rule in self.rules:
            if not rule.pattern.match(module):
                continue
            if rule.scheme is None:
                return ModuleScheme(scheme, False, f"{SETTINGS_PREFIX}dynamic[{rule.text[:100]!r}]")
            scheme = rule.scheme
            break
        if module.path == "lm_head":
            return ModuleScheme(scheme, self.head, self.head_setting)
        if self.inside and not any(
            f".{module.path}".endswith(f".{suffix}") for suffix in self.inside
        ):
            return ModuleScheme(scheme, False, f"{SETTINGS_PREFIX}modules_in_block_to_quantize")
        return ModuleScheme(scheme, not is_usually_unquantized(module))

    def weight_sinks(
        self, module: CheckpointLinear, weight: IntWeight, scheme: Scheme
    ) -> dict[str, WeightSink]:
        return gptq_sinks(module, weight, scheme, self.stored_less)


def read(settings: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format of a checkpoint's settings.

    Raises:
        CheckpointError: a setting is not supported.
    """
    return read_strictly(settings, "gptq", GPTQ)


def _static(c: SettingsReader) -> bool:
    """Return static_groups, which GPTQModel writes into `meta`."""
    meta = c.raw.get("meta")
    reader = SettingsReader(meta, f"{SETTINGS_PREFIX}meta.") if isinstance(meta, dict) else c
    return reader.get("static_groups", bool, c.get("static_groups", bool, False))


def _rule(c: SettingsReader, scheme: Scheme, text: str, options: SettingsReader) -> Rule:
    """Return the rule of an entry of `dynamic`.

    -:pattern leaves modules plain; +:pattern, or a pattern alone, changes their scheme.
    """
    pattern = c.pattern("dynamic", text.removeprefix("-:").removeprefix("+:"))
    return Rule(text, pattern, None if text.startswith("-:") else scheme.overridden(options))


def gptq_sinks(
    module: CheckpointLinear, weight: IntWeight, scheme: Scheme, stored_less: int
) -> dict[str, WeightSink]:
    """Return the sinks of a module's tensors. stored_less: offset of stored zero points."""
    n = module.whole_outputs
    k = module.inputs
    groups = weight.scales.shape[1]
    codes = WORD // scheme.bits
    int32 = (torch.int32,)
    where = weight.device
    sinks = {
        "qweight": WeightSink((-(-k // codes), n), int32, where, partial(_fill_codes, weight), 1),
        "qzeros": WeightSink(
            (groups, -(-n // codes)),
            int32,
            where,
            partial(_fill_zeros, module, weight, stored_less),
            1,
            codes,
        ),
        "scales": WeightSink(
            (groups, n), (weight.scales.dtype,), where, partial(fill_scales, module, weight), 1
        ),
    }
    if weight.g_idx is not None or "g_idx" in (module.tensors or ()):
        # Many files have a g_idx without desc_act. It is only checked, so it stays on the host.
        order = partial(_fill_order, module, weight)
        kept_at = torch.device("cpu") if weight.g_idx is None else where
        sinks["g_idx"] = WeightSink((k,), (torch.int32, torch.int64), kept_at, order, None)
    return sinks


def _fill_codes(weight: IntWeight, words: Tensor) -> None:
    """Fill the codes from words [K / c, N]."""
    k = weight.k
    shifts = ascending(weight.bits)

    def codes(begin: int, end: int) -> Tensor:
        return unpack_words(words[:, begin:end], shifts, weight.bits, dim=0)[:k].t()

    fill_words(weight, 1, codes)


def _fill_zeros(
    module: CheckpointLinear, weight: IntWeight, stored_less: int, words: Tensor
) -> None:
    """Fill the zero points from words [G, N / c]."""
    shifts = ascending(weight.bits)
    # One addition to the whole word undoes the borrows of the writer's subtraction.
    ones = sum(1 << shift for shift in shifts)
    zeros = unpack_words(words + stored_less * ones, shifts, weight.bits, dim=1)
    fill_zeros(module, weight, zeros[:, : module.outputs])


@lru_cache(maxsize=16)
def _in_order(k: int, group: int, device: torch.device) -> Tensor:
    """Return the group of each of k ordered columns; cached, since every expert asks for it."""
    return torch.arange(k, device=device) // group


def _fill_order(module: CheckpointLinear, weight: IntWeight, order: Tensor) -> None:
    """Copy the group of each column from order [K], checked to fill every group."""
    plain = _in_order(weight.k, weight.group, order.device)
    if weight.g_idx is None:
        if not bool((order == plain).all()) and bool(order.any()):
            problem = (
                "moves columns between groups, but config.json has no desc_act, or static_groups"
            )
            raise damaged_error(module, "g_idx", problem)
        return
    if not torch.equal(order.long().sort().values, plain):
        raise damaged_error(module, "g_idx", f"does not give each group its {weight.group} columns")
    weight.g_idx.copy_(order)
