"""Settings of config.json that may be ignored, each with the reason why it changes no answer.

A family adds its own in its file. Every other setting that no code has read is refused.
"""

from collections.abc import Mapping
from typing import Any

from lockstep.quantization.ignored_settings import is_switched_off

_WRITER = "notes of the library that wrote the file"
_TRAINING = "training alone: dropout, losses, initial values"
_OUTPUT = "what transformers returns besides the logits"
_TEXT_SIDE = "ids of tokens, which the text side reads"
_OTHER_MODALITY = "images, audio or video, which are not served"
_ELSEWHERE = "read by other code: dtype, length, weight format, draft module"

WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "architectures", "auto_map", "model_type", "transformers_version", "torchscript",
            "unsloth_version", "unsloth_fixed", "transformers.js_config", "use_cache",
            "cache_implementation", "name_or_path", "ep_size", "id2label", "label2id",
            "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix",
        ),
        _WRITER,
    ),
    **dict.fromkeys(
        (
            "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop",
            "embd_pdrop", "attention_probs_dropout_prob", "classifier_dropout", "initializer_range",
            "initializer_factor", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef",
            "router_jitter_noise", "router_z_loss_coef", "gradient_checkpointing",
        ),
        _TRAINING,
    ),
    **dict.fromkeys(
        (
            "output_hidden_states", "output_attentions", "output_router_logits", "return_dict",
            "num_logits_to_keep", "chunk_size_feed_forward",
        ),
        _OUTPUT,
    ),
    **dict.fromkeys(
        (
            "vision_config", "audio_config", "image_token_index", "video_token_index",
            "language_model_only", "ignore_index", "projector_hidden_act", "mm_hidden_size",
            "use_unified_vision_chunk", "video_placeholder",
        ),
        _OTHER_MODALITY,
    ),
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "sep_token_id"), _TEXT_SIDE),
    **dict.fromkeys(
        (
            "text_config", "dtype", "torch_dtype", "max_position_embeddings",
            "quantization_config", "compression_config", "num_nextn_predict_layers",
        ),
        _ELSEWHERE,
    ),
}  # fmt: skip

TOKEN_ID = "_token_id"
"""End of the names of token ids, which the text side reads or which mark images."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Scales of other families at the value with which they change nothing.
    **dict.fromkeys(
        (
            "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
            "scale_emb", "attention_in_multiplier", "attention_out_multiplier", "key_multiplier",
            "lm_head_multiplier", "pretraining_tp", "decoder_sparse_step", "moe_layer_freq",
            "embedding_scale", "n_group", "topk_group", "num_experts_per_group",
        ),
        (1, 1.0),
    ),
    "hidden_act": ("silu",),
    # Settings of generation that old files repeat at the defaults of transformers.
    "temperature": (1.0, 1),
    "top_k": (50,),
    "top_p": (1.0, 1),
    "typical_p": (1.0, 1),
    "repetition_penalty": (1.0, 1),
    "length_penalty": (1.0, 1),
    "encoder_no_repeat_ngram_size": (0,),
    "no_repeat_ngram_size": (0,),
    "diversity_penalty": (0.0, 0),
    "min_length": (0,),
    "max_length": (20,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
}  # fmt: skip
"""Settings that no family here has, or only some, at a value with which they change nothing."""


def is_off(name: str, value: Any) -> bool:
    """Return whether a setting that no code has read changes nothing with this value."""
    return is_switched_off(value) or any(
        type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ())
    )


def reason_of(name: str, of_family: Mapping[str, str]) -> str | None:
    """Return why a setting may be ignored; None where it may not."""
    if name.startswith("_"):
        return _WRITER
    if name.endswith(TOKEN_ID):
        return _TEXT_SIDE
    return WITHOUT_EFFECT.get(name) or of_family.get(name)
