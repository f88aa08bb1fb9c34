"""Weight formats of checkpoints, one file each.

For each linear layer a format gives the storage on the device (a Layout of
lockstep.kernels.formats.weights) and a WeightSink for each tensor of the checkpoint. FORMATS maps a
format's name in config.json to its file; docs/quantization.md explains how to add one.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lockstep.errors import CheckpointError, ConfigError, choice_error
from lockstep.quantization.round_to_nearest import METHODS, RoundToNearest
from lockstep.quantization.weight_format import CheckpointLinear, Layout, TensorInfo, WeightFormat
from lockstep.quantization.weight_sink import Ranges, WeightSink

__all__ = [
    "FORMATS",
    "Layout",
    "Ranges",
    "CheckpointLinear",
    "WeightFormat",
    "WeightSink",
    "TensorInfo",
    "is_same_format",
    "read_weight_format",
]

GGUF = "lockstep.quantization.gguf_format"
FORMATS: dict[str, str] = {
    "gptq": "lockstep.quantization.gptq",
    "awq": "lockstep.quantization.awq",
    "auto-round": "lockstep.quantization.auto_round",
    "auto_round": "lockstep.quantization.auto_round",
    "intel/auto-round": "lockstep.quantization.auto_round",
    "fp8": "lockstep.quantization.fp8",
    "compressed-tensors": "lockstep.quantization.compressed_tensors",
    "modelopt": "lockstep.quantization.modelopt",
    "modelopt_fp4": "lockstep.quantization.modelopt",
    "modelopt_mixed": "lockstep.quantization.modelopt",
    "gguf": GGUF,
}
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "gptq_marlin": ("gptq",),
    "gptq_bitblas": ("gptq",),
    "awq_marlin": ("awq",),
    "moe_wna16": ("gptq", "awq"),
    "inc": ("auto-round",),
}
"""vLLM's kernel names that users pass as a format -> formats of config.json."""


def is_same_format(method: object, other: object) -> bool:
    """Return whether two quant_methods name one format."""
    known = [FORMATS.get(name) if isinstance(name, str) else None for name in (method, other)]
    return known[0] is not None and known[0] == known[1]


def allows_format(chosen: str, method: str) -> bool:
    """Return whether the user's choice names the format of the checkpoint."""
    names = OTHER_NAMES.get(chosen, (chosen,))
    return any(is_same_format(name, method) for name in names)


def read_weight_format(
    settings: Mapping[str, Any] | None, chosen: str | None = None, activations: str = "auto"
) -> WeightFormat | None:
    """Return the weight format of a checkpoint, or the one to quantize it to; None for plain
    weights.

    Args:
        settings: quantization_config of the checkpoint, None without one.
        chosen: EngineConfig.quantization; of a quantized checkpoint only its own format is allowed.
        activations: EngineConfig.activation_dtype; "fp8" for e4m3 weights only.

    Raises:
        CheckpointError: the checkpoint's format is not supported.
        ConfigError: a choice does not fit the checkpoint.
    """
    weight_format = _read(settings, chosen)
    if activations == "auto":
        return weight_format
    refusal = weight_format.activation_refusal() if weight_format else "plain weights"
    if weight_format is None or refusal is not None:
        raise ConfigError(
            f"activation_dtype={activations!r} is not allowed with {refusal}; allowed: e4m3 "
            "weights without static activation scales. Leave the setting out, serve such a "
            "checkpoint, or quantize a plain one with quantization='fp8'."
        )
    weight_format.quantizes_activations = True
    return weight_format


def _read(settings: Mapping[str, Any] | None, chosen: str | None) -> WeightFormat | None:
    """Return the weight format; None for plain weights."""
    if settings is None:
        return _rounding(chosen)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise choice_error(
            CheckpointError,
            "config.json quantization_config.quant_method",
            method,
            ", ".join(FORMATS),
            "Serve a checkpoint in one of these formats, or one that is not quantized.",
        )
    if chosen in METHODS and FORMATS[method] == GGUF:
        return _rounding(chosen)  # a file's blocks are dequantized, and rounded anew
    if chosen is not None and not allows_format(chosen, method):
        remedy = f"The checkpoint is quantized already, as {method}; leave the setting out."
        raise choice_error(ConfigError, "quantization", chosen, f"{method!r} or None", remedy)
    return import_module(FORMATS[method]).read(settings)


def _rounding(chosen: str | None) -> WeightFormat | None:
    """Return the format that a plain checkpoint is quantized to while loading."""
    if chosen is None:
        return None
    if chosen not in METHODS:
        remedy = "The checkpoint is not quantized; choose one of these, or leave the setting out."
        allowed = ", ".join(map(repr, METHODS)) + " or None"
        raise choice_error(ConfigError, "quantization", chosen, allowed, remedy)
    return RoundToNearest(chosen)
