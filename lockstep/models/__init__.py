"""One file per architecture. `ARCHITECTURES` maps a checkpoint's model_type to its module.

docs/add_a_model.md makes one from an empty folder.
"""

from importlib import import_module
from types import ModuleType

from lockstep.errors import CheckpointError, choice_error

ARCHITECTURES = {
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
    does not use); where it drafts, Draft and DRAFT_PREFIX too.
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
