"""Weight formats of released checkpoints: settings, and writers of their weights."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.quantization.stored import MODELOPT_FP4, TENSORS_FP4, Writer, fp8_weight, int_weight

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
FP8 = {"quant_method": "fp8"}


@dataclass(frozen=True)
class Case:
    """A weight format.

    settings: its quantization_config; write: writes a weight; extra: suffixes of unused tensors.
    """

    settings: dict[str, Any]
    write: Writer
    extra: tuple[str, ...] = field(default=())


def compressed_settings(kind: str, **weights: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors with one group of all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


def ints(kind: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors for integers."""
    common = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    return compressed_settings(kind, **{**common, "group_size": 32, "dynamic": False, **weights})


def floats(strategy: str, kind: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors for e4m3fn."""
    return compressed_settings(kind, num_bits=8, type="float", strategy=strategy, **weights)


def modelopt(algorithm: str | None, method: str = "modelopt", **more: Any) -> dict[str, Any]:
    """Return settings of ModelOpt."""
    return {"quant_method": method, "quant_algo": algorithm, **more}


NVFP4 = compressed_settings(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
)
STATIC = ("input_scale",)
OLDER = (*STATIC, "kv_scale")
"""Unused suffixes of AutoFP8, which has one scale for keys and values."""
PER_CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
CASES = {
    "fp8 blocks": Case(BLOCKS, fp8_weight("block", "weight_scale_inv")),
    "fp8 blocks bf16": Case(BLOCKS, fp8_weight("block", "weight_scale_inv", torch.bfloat16)),
    "fp8 tensor": Case({**FP8, "activation_scheme": "static"}, fp8_weight("scalar"), OLDER),
    "fp8 channel": Case(FP8, fp8_weight("channel", dtype=torch.bfloat16)),
    "int4": Case(ints(), int_weight()),
    "int4 asymmetric": Case(ints(symmetric=False), int_weight(zeros="words")),
    "int4 old zeros": Case(ints(symmetric=False), int_weight(zeros="int8", dtype=torch.float16)),
    "int4 with spare zeros": Case(ints(), int_weight(zeros="words")),
    "int4 channel": Case(ints(strategy="channel", group_size=None), int_weight(group=0)),
    "int4 ordered": Case(ints(actorder="group"), int_weight(ordered=True)),
    "int4 static order": Case(ints(actorder="static"), int_weight(dtype=torch.float32)),
    "int8 words": Case(ints(**PER_CHANNEL), int_weight(8, 0)),
    "int8 words asymmetric": Case(ints(num_bits=8, symmetric=False), int_weight(8, zeros="words")),
    "int8 channel": Case(ints("int-quantized", **PER_CHANNEL), int_weight(8, 0, in_words=False)),
    "int8 tensor": Case(
        ints("int-quantized", num_bits=8, strategy="tensor", group_size=None),
        int_weight(8, 0, in_words=False, single=True),
    ),
    "int8 asymmetric": Case(
        ints("int-quantized", **{**PER_CHANNEL, "symmetric": False}),
        int_weight(8, 0, in_words=False, zeros="int8"),
    ),
    "naive int8": Case(ints("naive-quantized", **PER_CHANNEL), int_weight(8, 0, in_words=False)),
    "naive fp8": Case(floats("tensor", "naive-quantized"), fp8_weight("tensor"), STATIC),
    "float tensor": Case(floats("tensor"), fp8_weight("tensor")),
    "float channel": Case(floats("channel"), fp8_weight("channel", dtype=torch.bfloat16)),
    "float block": Case(floats("block", block_structure=[128, 128]), fp8_weight("block")),
    "tensors nvfp4": Case(NVFP4, TENSORS_FP4, ("input_global_scale",)),
    "modelopt fp8": Case(modelopt("FP8"), fp8_weight("scalar"), (*STATIC, "k_scale")),
    "modelopt channel": Case(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8_weight("channel")),
    "modelopt blocks": Case(modelopt("FP8_PB_WO"), fp8_weight("block", four=True)),
    "modelopt blocks, as written": Case(modelopt("fp8_pb_wo"), fp8_weight("block", four=True)),
    "modelopt blocks, named as DeepSeek's": Case(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO"}},
        fp8_weight("block", "weight_scale_inv"),
    ),
    "modelopt nvfp4": Case(modelopt("NVFP4", "modelopt_fp4", group_size=16), MODELOPT_FP4, STATIC),
    "modelopt w4a16": Case(modelopt("W4A16_NVFP4"), MODELOPT_FP4),
}
"""Every weight format, with one storage for all linear layers each."""
