"""Translation of a GGUF file's metadata to the settings of config.json.

There is a class per architecture of llama.cpp. Its settings() reads the metadata that config.json
has under other names; every other entry of the architecture is refused, since it may change the
math. Facts that the metadata omits are taken from the tensors.
"""

import struct
from collections.abc import Mapping
from typing import Any

from lockstep.errors import CheckpointError, choice_error
from lockstep.models.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from lockstep.models.gguf.file import GGUFModel
from lockstep.models.ignored_settings import is_off

WITHOUT_EFFECT: Mapping[str, str] = {
    "vocab_size": "the embedding's rows say it",
    "rope.scaling.finetuned": "a note of how the model was trained",
    "tensor_data_layout": "a note of the file that was converted",
    "rope.dimension_sections": "all position rows of text are equal",
}
"""Entries of an architecture that may be ignored -> why."""
FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16"}
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_DIVISORS = "rope_freqs.weight"
"""Divisor of each pair's rotary frequency: how Llama 3.1 and later are scaled."""


class Settings:
    """Reader of one architecture's settings, which read() returns as config.json has them.

    c: reader of the metadata without the architecture's prefix.
    """

    model_type: str

    def __init__(self, model: GGUFModel, name: str) -> None:
        prefix = f"{name}."
        settings = {
            key.removeprefix(prefix): value
            for key, value in model.metadata.items()
            if key.startswith(prefix)
        }
        self.model = model
        self.c = ConfigReader(settings, prefix, model.path.name)

    def read(self) -> dict[str, Any]:
        """Return config.json.

        Raises CheckpointError for metadata that is missing or that this engine does not support.
        """
        c = self.c
        self._check_common()
        heads = c.size("attention.head_count")
        hidden = c.size("embedding_length")
        head_dim = c.size("attention.key_length", max(hidden // heads, 1))
        c.one_of("attention.value_length", head_dim, default=head_dim)
        config = {
            "model_type": self.model_type,
            "torch_dtype": self._dtype(),
            "vocab_size": self._vocabulary(),
            "hidden_size": hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": c.size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": c.positive("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": c.size("context_length"),
            # The metadata does not say: llama.cpp uses the embedding where the head is absent.
            "tie_word_embeddings": HEAD not in self.model.tensors,
            "rope_parameters": self._rope(head_dim),
            **self._token_ids(),
            **self.settings(),
        }
        self._refuse_unread()
        return config

    @property
    def layers(self) -> int:
        """Number of layers, without draft layers."""
        # block_count includes the draft layers.
        drafting = self.c.get("nextn_predict_layers", int, 0)
        return self.c.size("block_count", max_value=MAX_LAYERS) - drafting

    def settings(self) -> dict[str, Any]:
        """Return the settings that only some architectures have."""
        return {"intermediate_size": self.c.size("feed_forward_length")}

    def _check_common(self) -> None:
        """Raise CheckpointError for values that would change the model's math."""
        self.c.one_of("attention.causal", True, default=True)
        drafting = self.c.get("nextn_predict_layers", int, 0)
        allowed = (0, 1) if isinstance(self, Hybrid) else (0,)
        self.c.need(drafting in allowed, "nextn_predict_layers", " or ".join(map(str, allowed)))

    def _vocabulary(self) -> int:
        entry = self.model.tensors.get(EMBEDDING)
        if entry is None or len(entry.shape) != 2:
            raise CheckpointError(
                f"{self.model.path} has no matrix {EMBEDDING}. Fetch the file again."
            )
        return entry.shape[0]

    def _dtype(self) -> str:
        """Return the dtype of the model on a GPU: that of the matrices, where they have one."""
        kinds = {e.kind for e in self.model.tensors.values() if len(e.shape) > 1}
        if kinds == {"F32"}:
            return "float32"
        for kind, dtype in FLOAT_DTYPES.items():
            if kind in kinds and kinds <= {kind, "F32"}:
                return dtype
        return "bfloat16"

    def _token_ids(self) -> dict[str, int]:
        """Return the ids of tokens that config.json names."""
        tokens = self.model.metadata
        ids = {
            f"{name}_token_id": tokens.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        return {name: number for name, number in ids.items() if number is not None}

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """Return rope_parameters."""
        c = self.c
        width = c.size("rope.dimension_count", head_dim)
        c.need(width <= head_dim, "rope.dimension_count", f"1 to {head_dim}")
        rope = {
            "rope_theta": c.positive("rope.freq_base", 10000.0),
            "partial_rotary_factor": width / head_dim,
        }
        scaling = c.one_of("rope.scaling.type", "none", "linear", "yarn", default="none")
        for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
            c.one_of(f"rope.scaling.{name}", 1.0, default=1.0)
        if ROPE_DIVISORS in self.model.tensors:
            c.need(scaling == "none", "rope.scaling.type", f"none, next to {ROPE_DIVISORS}")
            return rope | self._divisors(width)
        if scaling == "none":
            c.one_of("rope.scaling.factor", 1.0, 0.0, default=1.0)
            return rope
        rope |= {"rope_type": scaling, "factor": c.positive("rope.scaling.factor")}
        if scaling == "yarn":
            rope |= {
                "original_max_position_embeddings": c.size("rope.scaling.original_context_length"),
                "beta_fast": c.positive("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": c.positive("rope.scaling.yarn_beta_slow", 1.0),
            }
        return rope

    def _divisors(self, width: int) -> dict[str, Any]:
        """Return the scaling by a divisor of each pair's frequency: "longrope" with one list."""
        entry = self.model.tensors[ROPE_DIVISORS]
        if entry.kind != "F32" or entry.shape != (width // 2,):
            raise CheckpointError(
                f"{self.model.path}: {ROPE_DIVISORS} is {entry.kind} {list(entry.shape)}; allowed: "
                f"F32 [{width // 2}]. Fetch the file again."
            )
        # Without torch: settings may also be read where its tensors have no memory.
        divisors = list(struct.unpack(f"<{width // 2}f", entry.bytes(0, entry.row_bytes)))
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
        }

    def _refuse_unread(self) -> None:
        """Raise CheckpointError for an entry of the architecture that no code has read."""
        for name, value in self.c.raw.items():
            known = name in self.c.raw.names_read or name in WITHOUT_EFFECT
            if not known and not is_off(name, value):
                remedy = "Serve the model's safetensors, or another file of it."
                allowed = "entries that this architecture is built for"
                raise self.c.error(name[:100], value, allowed, remedy)


class Llama(Settings):
    """Llama, Mistral, SmolLM2 and others of the same form."""

    model_type = "llama"

    def settings(self) -> dict[str, Any]:
        """Return the settings; biases exist if the first layer has them."""
        tensors = self.model.tensors
        return {
            **super().settings(),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        }


class Mixtral(Settings):
    """Mixtral, which llama.cpp files under Llama's name, with experts."""

    model_type = "mixtral"

    def settings(self) -> dict[str, Any]:
        """Return the settings; feed_forward_length is the width of an expert."""
        return super().settings() | mixture(self.c)


class Qwen2(Settings):
    """Qwen2 and Qwen2.5."""

    model_type = "qwen2"


class Qwen3(Settings):
    """Qwen3, dense."""

    model_type = "qwen3"


class Qwen3MoE(Settings):
    """Qwen3 with a mixture of experts."""

    model_type = "qwen3_moe"

    def settings(self) -> dict[str, Any]:
        """Return the settings: a mixture in every layer, and weights that llama.cpp always
        normalizes.
        """
        self.c.get("feed_forward_length", int, 0)  # written, but no layer has a dense MLP
        width = self.c.size("expert_feed_forward_length")
        return {**mixture(self.c), "moe_intermediate_size": width, "norm_topk_prob": True}


class Hybrid(Settings):
    """Gated DeltaNet with attention in every few layers: Qwen3.5, dense."""

    model_type = "qwen3_5_text"

    def settings(self) -> dict[str, Any]:
        """Return the sizes of the recurrent layers too."""
        c = self.c
        value_heads = c.size("ssm.time_step_rank")
        inner = c.size("ssm.inner_size")
        c.need(inner % value_heads == 0, "ssm.inner_size", f"multiples of {value_heads}")
        return {
            "full_attention_interval": c.size("full_attention_interval", 4),
            "linear_num_key_heads": c.size("ssm.group_count"),
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": c.size("ssm.state_size"),
            "linear_value_head_dim": inner // value_heads,
            "linear_conv_kernel_dim": c.size("ssm.conv_kernel"),
            "mtp_num_hidden_layers": c.get("nextn_predict_layers", int, 0),
            **self.mlp(),
        }

    def mlp(self) -> dict[str, Any]:
        """Return the sizes of a layer's MLP."""
        return {"intermediate_size": self.c.size("feed_forward_length")}


class HybridMoE(Hybrid):
    """Qwen3.5 with a mixture of experts."""

    model_type = "qwen3_5_moe_text"

    def mlp(self) -> dict[str, Any]:
        """Return the sizes of the mixture."""
        self.c.get("feed_forward_length", int, 0)
        return {
            **mixture(self.c),
            "moe_intermediate_size": self.c.size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": self.c.size("expert_shared_feed_forward_length"),
        }


class Qwen3Next(HybridMoE):
    """Qwen3-Next. llama.cpp stores its projections one after the other, as Qwen3.5 has them."""


ARCHITECTURES: Mapping[str, type[Settings]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3moe": Qwen3MoE,
    "qwen35": Hybrid,
    "qwen35moe": HybridMoE,
    "qwen3next": Qwen3Next,
}
"""Reader of each general.architecture."""


def mixture(c: ConfigReader) -> dict[str, Any]:
    """Return the number of experts, and the number of experts per token."""
    c.one_of("expert_weights_norm", True, default=True)
    c.one_of("expert_weights_scale", 1.0, 0.0, default=1.0)
    c.one_of("expert_gating_func", 1, default=1)  # softmax
    return {
        "num_experts": c.size("expert_count", max_value=MAX_EXPERTS),
        "num_experts_per_tok": c.size("expert_used_count"),
    }


def settings_of(model: GGUFModel) -> Settings:
    """Return the reader of a file's architecture. Raises CheckpointError where there is none."""
    general = ConfigReader(model.metadata, file=model.path.name)
    general.one_of("general.type", "model", default="model")
    name = general.get("general.architecture", str)
    if name not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        remedy = "Serve a file of one of these, or the model's safetensors."
        field = f"{model.path} general.architecture"
        raise choice_error(CheckpointError, field, name, allowed, remedy)
    kind = ARCHITECTURES[name]
    if kind is Llama and model.metadata.get("llama.expert_count"):
        kind = Mixtral
    return kind(model, name)
