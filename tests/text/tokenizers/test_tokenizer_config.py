"""Settings of tokenizer_config.json are applied, compared with tokenizer.json, ignored, or
refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from lockstep.errors import CheckpointError
from lockstep.text.tokenizers.tokenizer import Tokenizer
from lockstep.text.tokenizers.tokenizer_config import WITHOUT_EFFECT
from tests.text.model_families import FAMILIES

QWEN3_5 = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "audio_bos_token": "<|audio_start|>",
    "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]},
    "backend": "tokenizers",
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "extra_special_tokens": {"vision_bos_token": "<|vision_start|>"},
    "image_token": "<|image_pad|>",
    "is_local": False,
    "model_max_length": 262144,
    "model_specific_special_tokens": {"image_token": "<|image_pad|>"},
    "pad_token": "<|endoftext|>",
    "pretokenize_regex": "(?i:'s|'t)",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
DEEPSEEK_V3 = {
    "add_bos_token": False,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "normalized": True},
    "clean_up_tokenization_spaces": False,
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "normalized": True},
    "legacy": True,
    "model_max_length": 16384,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizerFast",
    "unk_token": None,
}
LLAMA3 = {
    "bos_token": "<|im_start|>",
    "clean_up_tokenization_spaces": True,
    "eos_token": "<|im_end|>",
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": 131072,
    "padding_side": "left",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
REFUSED: dict[str, Any] = {
    "split_special_tokens": True,
    "do_lower_case": True,
    "strip_accents": True,
    "tokenize_chinese_chars": True,
    "fix_mistral_regex": True,
    "add_prefix_space": True,
    "add_dummy_prefix": True,
    "errors": "ignore",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    "add_bos_token": "yes",
    "add_sep_token": True,
    "normalizer": {"type": "NFKC"},
    "dropout": 0.1,
    "unheard_of": 1,
}


@pytest.fixture
def load(folder: Path, tmp_path: Path) -> Any:
    """Return a function that loads the tokenizer with only these settings."""

    def load(settings: dict[str, Any], fast: Any = None) -> Tokenizer:
        shutil.copy(folder / "tokenizer.json", tmp_path)
        if fast is not None:
            fast.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer(tmp_path)

    return load


@pytest.mark.parametrize("settings", [QWEN3_5, DEEPSEEK_V3, LLAMA3], ids=["qwen", "ds", "llama"])
def test_settings_of_published_checkpoints_keep_tokens(
    load: Any, tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    text = "a fox . <|im_end|> the end"
    ids = tokenizer.encode(text)
    assert load(settings).encode(text) == ids
    assert load(settings).decode(ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_setting_is_refused_by_name(load: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json {name}=.*allowed"):
        load({name: REFUSED[name]})
    load({name: None})


def test_settings_without_effect_are_ignored(load: Any, tokenizer: Tokenizer) -> None:
    listed: dict[str, Any] = dict.fromkeys(WITHOUT_EFFECT, "x")
    assert load({**listed, "_note": 1, "mask_token_id": 5}).encode("a fox") == tokenizer.encode(
        "a fox"
    )
    assert all(WITHOUT_EFFECT.values())


def test_raw_text_gets_the_added_tokens(load: Any, tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("a fox")
    bos, end = (tokenizer.fast.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    first = load({**named, "add_bos_token": True})
    assert first.encode("a fox") == [bos, *plain]
    assert first.encode("a fox", add_special_tokens=False) == plain
    both = load({**named, "add_bos_token": True, "add_eos_token": True})
    assert both.encode("a fox") == [bos, *plain, end]
    assert load({"add_bos_token": True}).encode("a fox") == plain, "no bos_token is named"
    with pytest.raises(CheckpointError, match="add_bos_token=true.*<none>"):
        load({"bos_token": "<none>", "add_bos_token": True})


def test_token_of_tokenizer_json_is_added_once(load: Any) -> None:
    fast = FAMILIES["llama3"].tokenizer()
    bos = "<|begin_of_text|>", fast.token_to_id("<|begin_of_text|>")
    fast.post_processor = TemplateProcessing(single=f"{bos[0]}:0 $A:0", special_tokens=[bos])
    for expected in (True, False, None):
        settings = {"add_bos_token": expected, "bos_token": bos[0]}
        assert load(settings, fast).encode("a") == fast.encode("a").ids


@pytest.mark.parametrize("family", ["mistral", "mistral, always", "llama3"])
def test_prefix_space_equals_tokenizer_json(load: Any, family: str) -> None:
    fast = FAMILIES[family].tokenizer()
    prefixed = family.startswith("mistral")
    assert load({"add_prefix_space": prefixed}, fast).encode("a") == fast.encode("a").ids
    with pytest.raises(CheckpointError, match="add_prefix_space=.*as tokenizer.json does"):
        load({"add_prefix_space": not prefixed}, fast)
