"""Companions of the bundled model in a check: a tiny attention-only model and a tiny mixture.

Their weights are random. They have storage kinds, layers and formats that the bundled model lacks.
One of their steps takes a sixth of the time of a step of the bundled model.
"""

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.check.engines import CheckEngine, Processors, build, build_plain
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.random_adapters import RandomAdapters
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rank_pool import RankPool

ATTENTION = "attention"
"""Companion without recurrent layers: generated pages enter its prefix cache."""
MIXTURE = "mixture"
"""Companion with recurrent layers, attention, routed experts, a shared expert and MTP."""
AS_SERVED = "as served"
"""Name of the formats that the user's settings choose."""
NUMERICS: dict[str, dict[str, str]] = {
    AS_SERVED: {},
    "bf16 logits": {"dtype": "bfloat16"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8_per_token_head"},
    "bf16 state": {"mamba_ssm_cache_dtype": "bfloat16"},
    "fp8 weights": {"quantization": "fp8"},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
}
"""Name -> settings of an engine's formats. Each has its own plain runs.

Logits of 16 bits are often equal, so they test the order of ties.
"""
UNSHARED = ("model", "hf_overrides", "load_format", "speculative_config")
"""Settings of the served model that its companions do not have."""
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_CONFIGS: dict[str, dict[str, Any]] = {
    ATTENTION: {
        **_COMMON,
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "intermediate_size": 128,
        "max_window_layers": 2,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    MIXTURE: {
        **_COMMON,
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of the bundled model that a companion shares."""
COPIED_SETTINGS = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")
"""Settings of the bundled model's config.json that belong to its tokenizer."""
FORMAT_SETTINGS = (
    "dtype",
    "quantization",
    "activation_dtype",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
)
"""Settings that choose formats."""


def numerics_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the formats that companions may have: the user's, if there are any."""
    if any(settings.get(name) not in (None, "auto") for name in FORMAT_SETTINGS):
        return (AS_SERVED,)
    return tuple(NUMERICS)


class Companions:
    """Companion checkpoints and their plain runs, made when they are needed.

    Their files exist as long as this object. bundled: folder of the bundled model, whose tokenizer
    they have. settings: the user's settings for all engines. rank_pool: see CheckHooks.
    """

    def __init__(
        self, bundled: Path, settings: dict[str, Any], rank_pool: RankPool | None = None
    ) -> None:
        self.bundled = bundled
        self._rank_pool = rank_pool
        self._shared = {name: value for name, value in settings.items() if name not in UNSHARED}
        self._plain: dict[tuple[str, str], PlainRuns] = {}
        self._adapters: dict[str, RandomAdapters] = {}
        # All companions have the tokenizer of the bundled model.
        self._processors: Processors = {}

    @cached_property
    def _folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="lockstep-check-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        known = json.loads((self.bundled / "config.json").read_text(encoding="utf-8"))
        for name, config in _CONFIGS.items():
            target = folder / name
            target.mkdir()
            for file in TOKENIZER_FILES:
                if (self.bundled / file).exists():
                    shutil.copyfile(self.bundled / file, target / file)
            config = {**{key: known.get(key) for key in COPIED_SETTINGS}, **config}
            (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    def settings(self, numerics: str) -> dict[str, Any]:
        """Return the settings that all engines of a companion share."""
        return {**self._shared, **NUMERICS[numerics], "load_format": "dummy"}

    def plain(self, model: str, numerics: str) -> PlainRuns:
        """Return the plain runs of a companion. Raises what LLM raises."""
        key = (model, numerics)
        if key not in self._plain:
            folder = str(self._folder / model)
            engine = build_plain(folder, self.settings(numerics), self._processors)
            self._plain[key] = PlainRuns(engine, self._adapted(model, numerics, engine))
        return self._plain[key]

    def _adapted(self, model: str, numerics: str, engine: CheckEngine) -> Callable[[], CheckEngine]:
        """Return a function that builds the plain engine with adapters."""
        if model not in self._adapters:
            self._adapters[model] = RandomAdapters(worker_of(engine.engine).model)
        adapters = self._adapters[model]
        settings = self.settings(numerics)
        folder = str(self._folder / model)
        return lambda: build_plain(folder, {**settings, **adapters.settings()}, self._processors)

    def build(
        self,
        model: str,
        numerics: str,
        engine_settings: dict[str, Any],
        hooks: CheckHooks,
        with_adapters: bool,
    ) -> CheckEngine:
        """Build an engine of a companion. Raises what LLM raises."""
        self.plain(model, numerics)
        settings = {**engine_settings, **self.settings(numerics)}
        if with_adapters:
            settings |= self._adapters[model].settings()
        folder = str(self._folder / model)
        return build(folder, settings, hooks, self._processors, self._rank_pool)
