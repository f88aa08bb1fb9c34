"""Settings of tokenizer_config.json: read, ignored, compared with tokenizer.json, or refused.

tokenizer.json is the complete tokenizer. Other settings repeat it, matter to other libraries only,
or would change token ids or text. A setting that would change them is an error that names it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Fast

from lockstep.errors import CheckpointError, choice_error
from lockstep.text.model_files import refuse_unread

_WRITER = "metadata of the library that wrote the file"
_STORED = "how the tokenizer was built; tokenizer.json is the result"
_CALLS = "defaults of padding, truncation and batching, which are not used"
_MODALITY = "images, audio or video, which are not served"
_ANSWERS = "how transformers reads answers; the parsers read them here"
_TOKENS = "names of tokens; tokenizer.json says which exist"

READ = frozenset(("added_tokens_decoder", "chat_template", "extra_special_tokens"))
"""Settings that are read. Strings named *_token are read as names of special tokens."""

WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "tokenizer_class", "processor_class", "auto_map", "backend", "is_local",
            "local_files_only", "name_or_path", "special_tokens_map_file", "tokenizer_file",
            "vocab_file", "merges_file", "transformers_version", "trust_remote_code", "use_fast",
            "from_slow", "init_inputs", "tokenizer_type", "cache_dir", "revision", "torch_dtype",
            "device_map", "unsloth_version", "files_loaded", "verbose", "max_len_single_sentence",
            "max_len_sentences_pair", "commit_hash",
        ),
        _WRITER,
    ),
    **dict.fromkeys(
        (
            "legacy", "sp_model_kwargs", "pretokenize_regex", "vocab_size", "model_type",
            "spaces_between_special_tokens", "use_default_system_prompt", "unk_id", "bos_id",
            "eos_id", "pad_id", "num_reserved_special_tokens", "legacy_format",
        ),
        _STORED,
    ),
    **dict.fromkeys(
        (
            "model_max_length", "max_length", "max_len", "padding", "padding_side",
            "pad_to_multiple_of", "pad_token_type_id", "pad_to_max_length", "stride", "truncation",
            "truncation_side", "truncation_strategy", "model_input_names", "return_tensors",
            "return_token_type_ids", "return_attention_mask",
        ),
        _CALLS,
    ),
    **dict.fromkeys(
        (
            "image_seq_length", "patch_size", "max_pixels", "min_pixels", "num_image_token",
            "image_size", "size", "image_mean", "image_std", "do_resize", "do_normalize",
        ),
        _MODALITY,
    ),
    **dict.fromkeys(("response_schema", "response_template", "tool_parser_type"), _ANSWERS),
    **dict.fromkeys(("additional_special_tokens", "model_specific_special_tokens"), _TOKENS),
}  # fmt: skip
"""Settings that are ignored whatever their value, each with the reason."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {"errors": ("replace",)}
"""Unsupported settings, with the value at which they change nothing."""

CLEAN_UP = "clean_up_tokenization_spaces"
"""Setting that removes blanks before punctuation when decoding. It has no effect on BPE, as in
transformers."""
PREFIX = "add_prefix_space"
"""Setting that puts a blank before each text."""
ADDED = ("add_bos_token", "add_eos_token")
"""Settings that add the bos_token before a raw text and the eos_token after it."""
REMEDY = (
    "If tokenizer.json is right, set it to null in a copy of the file; otherwise save the "
    "tokenizer again with the library that wrote it."
)


def check_tokenizer_config(path: Path, settings: Mapping[str, Any], fast: Fast) -> None:
    """Raise CheckpointError for a setting that changes token ids or text and is not supported.

    fast: tokenizer of tokenizer.json, which the settings must agree with.
    """
    _check_prefix(path, settings.get(PREFIX), fast)
    known = READ.union(WITHOUT_EFFECT, ADDED, (PREFIX,), _token_names(settings))
    if type(fast.model).__name__ == "BPE":
        known |= {CLEAN_UP}
    for name in ADDED:
        value = settings.get(name)
        if value is not None and not isinstance(value, bool):
            raise choice_error(CheckpointError, f"{path} {name}", value, "true, false", REMEDY)
    refuse_unread(path, settings, known, NEUTRAL, REMEDY)


def _token_names(settings: Mapping[str, Any]) -> set[str]:
    """Return the settings that name a token, or the id of one."""
    return {
        name
        for name in settings
        if name.endswith(("_token", "_token_id"))
        # Switches such as add_sep_token change ids, and are no names.
        and not name.startswith(("add_", "use_", "split_", "strip_"))
    }


def _check_prefix(path: Path, add_prefix_space: object, fast: Fast) -> None:
    """Raise CheckpointError unless tokenizer.json treats a leading blank as the setting says."""
    if add_prefix_space is None:
        return
    text = fast.normalizer.normalize_str("a") if fast.normalizer else "a"
    # The first piece of "a" shows whether any step writes a blank before it.
    words = fast.pre_tokenizer.pre_tokenize_str(text) if fast.pre_tokenizer else [(text, (0, 1))]
    prefixed = bool(words) and words[0][0] != "a"
    if add_prefix_space is not prefixed:
        allowed = f"{str(prefixed).lower()}, as tokenizer.json does, or null"
        raise choice_error(CheckpointError, f"{path} {PREFIX}", add_prefix_space, allowed, REMEDY)
