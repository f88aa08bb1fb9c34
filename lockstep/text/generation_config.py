"""Settings of generation_config.json: read, ignored, or refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.text.model_files import refuse_unread

_WRITER = "metadata of the library that wrote the file"
_OUTPUT = "further outputs of transformers"
_TOKEN_ID = "ids of tokens that start or pad a text, which the tokenizer defines"
_BEAMS = "settings of beam search only, which num_beams turns on"
_CACHE = "how transformers stores keys and values, or compiles the model"
_ASSISTANT = "drafts of transformers, which change no answer"
_LENGTH = "bounds of the whole text, which max_model_len sets"
_NAMES = "the name of a prompt format; the chat template writes prompts"

WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        ("transformers_version", "use_model_defaults", "trust_remote_code", "generation_kwargs"),
        _WRITER,
    ),
    **dict.fromkeys(
        (
            "output_attentions", "output_hidden_states", "output_scores", "output_logits",
            "return_dict_in_generate", "remove_invalid_values", "renormalize_logits",
        ),
        _OUTPUT,
    ),
    **dict.fromkeys(
        (
            "bos_token_id", "pad_token_id", "decoder_start_token_id", "user_token_id",
            "assistant_token_id", "sep_token_id", "unk_token_id",
        ),
        _TOKEN_ID,
    ),
    **dict.fromkeys(("early_stopping", "length_penalty", "low_memory"), _BEAMS),
    **dict.fromkeys(
        (
            "use_cache", "cache_implementation", "cache_config", "return_legacy_cache",
            "compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config",
        ),
        _CACHE,
    ),
    **dict.fromkeys(
        (
            "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
            "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
            "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
        ),
        _ASSISTANT,
    ),
    **dict.fromkeys(("max_length", "max_window_size"), _LENGTH),
    "chat_format": _NAMES,
}  # fmt: skip
"""Settings that are ignored whatever their value, each with the reason."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams",
            "num_beam_groups", "num_return_sequences",
        ),
        (1,),
    ),
    **dict.fromkeys(
        (
            "top_h", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty",
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens",
        ),
        (0,),
    ),
}  # fmt: skip
"""Unsupported settings, with the value at which they change nothing."""

REMEDY = (
    "Set it to null in a copy of the file and name the copy's folder in generation_config, or set "
    "generation_config to vllm, which takes no sampling defaults from the file."
)


def check_generation_config(path: Path, settings: Mapping[str, Any], read: frozenset[str]) -> None:
    """Raise CheckpointError for a setting that changes the answer and is not supported.

    read: names of the settings that are read.
    """
    refuse_unread(path, settings, read.union(WITHOUT_EFFECT), NEUTRAL, REMEDY)
