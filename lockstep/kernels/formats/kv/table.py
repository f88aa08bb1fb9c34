"""Table of KV formats: the values of kv_cache_dtype besides auto."""

import torch

from lockstep.errors import ConfigError, choice_error
from lockstep.kernels.formats.kv import KVFormat, KVQuantizer
from lockstep.kernels.formats.kv.bf16 import FORMAT as BFLOAT16
from lockstep.kernels.formats.kv.fp8 import E4M3, E5M2
from lockstep.kernels.formats.kv.int8 import FORMAT as INT8
from lockstep.kernels.formats.kv.turboquant import PRESETS

KV_FORMATS: dict[str, KVFormat] = {
    "bfloat16": BFLOAT16,
    "fp8": E4M3,
    "fp8_e4m3": E4M3,
    "fp8_e5m2": E5M2,
    "int8_per_token_head": INT8,
    **PRESETS,
}


def check_kv_cache_dtype(name: str) -> str:
    """Return a kv_cache_dtype unchanged. Raises ValueError for an unknown name."""
    if name not in kv_cache_dtypes():
        raise ValueError(name)
    return name


def kv_cache_dtypes() -> tuple[str, ...]:
    """Return the allowed values of kv_cache_dtype."""
    return ("auto", *KV_FORMATS)


def kv_format(name: str, dtype: torch.dtype) -> KVFormat | None:
    """Return the format of a kv_cache_dtype; None: the cache is of the model's dtype."""
    if name == "auto" or name == str(dtype).removeprefix("torch."):
        return None
    return KV_FORMATS[name]


def load_device_functions() -> None:
    """Import the device functions of every format. Needs Triton."""
    for format in KV_FORMATS.values():
        for quantizer in (format.k, format.v, format.latent):
            if quantizer is not None and quantizer.device_path is not None:
                quantizer.device_functions()
            if quantizer is not None and quantizer.mma_path is not None:
                quantizer.mma_functions()


def head_quantizers(
    format: KVFormat | None, dim: int, setting: str = "kv_cache_dtype"
) -> tuple[KVQuantizer, KVQuantizer] | None:
    """Return the quantizers of keys and values of heads of this dim; None without a format.

    Raises ConfigError, which names the setting that chose the format, if the format cannot store
    such heads.
    """
    if format is None:
        return None
    reason = format.unsupported_reason(dim)
    if reason is None:
        return format.k, format.v
    usable = [
        name for name, kv_format in KV_FORMATS.items() if kv_format.unsupported_reason(dim) is None
    ]
    allowed = f"{', '.join(('auto', *usable))}, since {reason}"
    remedy = "Choose one of them for this model."
    raise choice_error(ConfigError, setting, format.name, allowed, remedy)


def latent_quantizer(
    format: KVFormat | None, dim: int, setting: str = "kv_cache_dtype"
) -> KVQuantizer | None:
    """Return the quantizer of latents of this dim; None without a format.

    Raises ConfigError, which names the setting that chose the format, if the format cannot store
    such latents.
    """
    if format is None:
        return None
    reason = "a latent is key and value at once, and this format has no quantizer for it"
    if format.latent is not None:
        unsupported = format.latent.unsupported_reason(dim)
        if unsupported is None:
            return format.latent
        reason = unsupported
    usable = [
        name
        for name, kv_format in KV_FORMATS.items()
        if kv_format.latent and not kv_format.latent.unsupported_reason(dim)
    ]
    allowed = f"{', '.join(('auto', *usable))}, since {reason}"
    remedy = "Choose one of them for multi-head latent attention."
    raise choice_error(ConfigError, setting, format.name, allowed, remedy)
