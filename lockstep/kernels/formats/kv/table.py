"""The table of KV formats: what kv_cache_dtype may say besides auto."""

import torch

from lockstep.errors import ConfigError, choice_error
from lockstep.kernels.formats.kv import Codec, KVFormat
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
    """A kv_cache_dtype. Raises ValueError where there is none of this name."""
    if name not in kv_cache_dtypes():
        raise ValueError(name)
    return name


def kv_cache_dtypes() -> tuple[str, ...]:
    """What kv_cache_dtype may say."""
    return ("auto", *KV_FORMATS)


def kv_format(name: str, dtype: torch.dtype) -> KVFormat | None:
    """The format of a kv_cache_dtype; None: the cache is of the model's dtype."""
    if name == "auto" or name == str(dtype).removeprefix("torch."):
        return None
    return KV_FORMATS[name]


def load_device_functions() -> None:
    """Import the kernels' side of every format. Needs Triton."""
    for format in KV_FORMATS.values():
        for codec in (format.k, format.v, format.latent):
            if codec is not None and codec.device_at is not None:
                codec.device()
            if codec is not None and codec.fragments_at is not None:
                codec.fragments()


def head_codecs(
    format: KVFormat | None, dim: int, setting: str = "kv_cache_dtype"
) -> tuple[Codec, Codec] | None:
    """How keys and values of heads of this dim are stored in a format. Raises ConfigError, naming
    the setting that chose the format, where they are not."""
    if format is None:
        return None
    why_not = format.refusal(dim)
    if why_not is None:
        return format.k, format.v
    usable = [name for name, one in KV_FORMATS.items() if one.refusal(dim) is None]
    allowed = f"{', '.join(('auto', *usable))}, since {why_not}"
    remedy = "Choose one of them for this model."
    raise choice_error(ConfigError, setting, format.name, allowed, remedy)


def latent_codec(
    format: KVFormat | None, dim: int, setting: str = "kv_cache_dtype"
) -> Codec | None:
    """How latents of this dim are stored in a format. Raises ConfigError, naming the setting that
    chose the format, where they are not."""
    if format is None:
        return None
    why_not = "a latent is key and value at once, and this format has no codec for it"
    if format.latent is not None:
        refusal = format.latent.refusal(dim)
        if refusal is None:
            return format.latent
        why_not = refusal
    usable = [
        name for name, one in KV_FORMATS.items() if one.latent and not one.latent.refusal(dim)
    ]
    allowed = f"{', '.join(('auto', *usable))}, since {why_not}"
    remedy = "Choose one of them for multi-head latent attention."
    raise choice_error(ConfigError, setting, format.name, allowed, remedy)
