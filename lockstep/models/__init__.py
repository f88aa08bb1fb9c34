"""Model architectures, one file each; ARCHITECTURES maps a model_type to its module.

docs/add_a_model.md adds one step by step.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from lockstep.errors import CheckpointError, choice_error

ARCHITECTURES = {
    "deepseek_v3": "lockstep.models.deepseek_v3",
    "kimi_k2": "lockstep.models.deepseek_v3",
    "kimi_k25": "lockstep.models.deepseek_v3",
    "llama": "lockstep.models.llama",
    "mixtral": "lockstep.models.mixtral",
    "nemotron_h": "lockstep.models.nemotron_h",
    "qwen2": "lockstep.models.qwen2",
    "qwen3": "lockstep.models.qwen3",
    "qwen3_5": "lockstep.models.qwen3_5",
    "qwen3_5_text": "lockstep.models.qwen3_5",
    "qwen3_5_moe": "lockstep.models.qwen3_5_moe",
    "qwen3_5_moe_text": "lockstep.models.qwen3_5_moe",
    "qwen3_moe": "lockstep.models.qwen3_moe",
    "qwen3_next": "lockstep.models.qwen3_next",
}


def architecture(model_type: object) -> ModuleType:
    """Return the module that builds this model_type.

    It defines Config, Model, PREFIXES (of tensor names) and IGNORED (prefixes of tensors that the
    text model does not use). If it drafts, it defines Draft and DRAFT_PREFIX, or draft_prefix(raw)
    if config.json decides the prefix.
    """
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise choice_error(
            CheckpointError,
            "model_type",
            model_type,
            ", ".join(ARCHITECTURES),
            "Serve a checkpoint of one of these architectures.",
        )
    return import_module(ARCHITECTURES[model_type])


def draft_prefix(module: ModuleType, raw: dict[str, Any]) -> str | None:
    """Return the prefix of the draft module's tensors, after the architecture's; None without one.

    raw: settings of config.json.
    """
    if not hasattr(module, "Draft"):
        return None
    prefix: str = (
        module.draft_prefix(raw) if hasattr(module, "draft_prefix") else module.DRAFT_PREFIX
    )
    return prefix
