"""One file per architecture. `ARCHITECTURES` maps a checkpoint's model_type to its module.

docs/add_a_model.md makes one from an empty folder.
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
    """The module that builds this model_type.

    It has Config, Model, PREFIXES (of checkpoint names) and IGNORED (tensors that the text model
    does not use, by how their names begin); where it drafts, Draft and DRAFT_PREFIX too, or
    draft_prefix(raw) where config.json decides it.
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
    """How names of the draft module's tensors begin, less the architecture's prefix; None: it has
    no draft module. raw: config.json's."""
    if not hasattr(module, "Draft"):
        return None
    found: str = (
        module.draft_prefix(raw) if hasattr(module, "draft_prefix") else module.DRAFT_PREFIX
    )
    return found
