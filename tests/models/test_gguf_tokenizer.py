"""Tokenizers from GGUF metadata equal those of transformers."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers

from lockstep.errors import CheckpointError
from lockstep.models.gguf.file import GGUFModel
from lockstep.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from lockstep.models.gguf.tokenizer import text_files
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.models.gguf_files import finish, write_value

TEXTS = (
    "The quick brown fox isn't 12345 years old; THEY'RE 3.14 metres (or so) away!",
    "naïve café Ünïcödé 日本語のテキスト 한국어 русский ελληνικά 🦊🦊",
    "def f(x):\n    return x + 1\n\n\n\t# done\r\n  ",
    "  leading, and   inner   blanks   ",
    "HTTPServer camelCase snake_case C++ a/b\\c <tag> [x] {y} 'quoted' \"too\" it'S",
    "x" * 50 + " " + "12" * 20,
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>"]


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """Return metadata of a byte-level BPE without its pre-tokenizer."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([*TEXTS * 3, "123 12 456 45"], trainer)
    model = json.loads(fast.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), *CONTROL, *ADDED, "[PAD605]"]
    kinds = [1] * len(model["vocab"]) + [3] * len(CONTROL) + [4] * len(ADDED) + [5]
    return {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def write(path: Path, metadata: dict[str, Any], **more: Any) -> Path:
    """Write a file that has only a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        write_value(writer, f"tokenizer.{key}", value)
    for key, value in more.items():
        write_value(writer, key, value)
    finish(writer)
    return path


def tokenizer_of(path: Path) -> Tokenizer:
    """Return the tokenizer converted from the metadata."""
    for name, value in text_files(GGUFModel([path])).items():
        (path.parent / name).write_text(json.dumps(value))
    return Tokenizer(path.parent)


def transformers_tokenizer(path: Path) -> Fast:
    """Return transformers' tokenizer of the metadata."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    architecture, tokenizer, _ = mapping.get_gguf_tokenizer(str(path))
    return mapping.convert_gguf_tokenizer(architecture, tokenizer)[0]


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "llama-bpe", "gpt-4o", "tekken"])
def test_byte_level_tokens_equal_transformers(
    pre: str, byte_level: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", {**byte_level, "ggml.pre": pre})
    ours, theirs = tokenizer_of(path), transformers_tokenizer(path)
    for text in (*TEXTS, "".join(TEXTS), "<think>a</think><|im_end|>"):
        ids = ours.encode(text, add_special_tokens=False)
        if pre not in ("llama-bpe", "tekken"):  # these encode whole pre-tokens that are tokens
            assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert [ours.token(i) for i in ids].count("<think>") == text.count("<think>")
        assert ours.decode(ids, skip_special_tokens=False) == text
    begins = PRE_TOKENIZERS[pre].bos
    assert (ours.encode("a")[0] == byte_level["ggml.bos_token_id"]) == begins


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "deepseek-v3"])
def test_pre_tokens_equal_published_tokenizers(
    pre: str, byte_level: dict[str, Any], tmp_path: Path
) -> None:
    """SmolLM separates digits and then splits as GPT-2 does."""
    ours = tokenizer_of(write(tmp_path / "m.gguf", {**byte_level, "ggml.pre": pre}))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known = {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
    }
    for text in TEXTS:
        scored_bpe = ours.fast.pre_tokenizer.pre_tokenize_str(text)
        if pre in known:
            assert scored_bpe == known[pre].pre_tokenize_str(text)
        assert ours.decode(ours.encode(text)) == text
    if pre == "deepseek-v3":
        spelled = [chunk for chunk, _ in ours.fast.pre_tokenizer.pre_tokenize_str("a 12345 b")]
        assert spelled == ["a", "Ġ", "123", "45", "Ġb"]


def test_special_and_eos_tokens_come_from_the_file(
    byte_level: dict[str, Any], tmp_path: Path
) -> None:
    templates = {"chat_templates": ["tool_use"], "chat_template.tool_use": "{{ tools }}"}
    metadata = {**byte_level, "ggml.pre": "qwen2", "chat_template": "{{ messages }}", **templates}
    path = write(tmp_path / "m.gguf", metadata)
    tokenizer = tokenizer_of(path)
    token = tokenizer.token
    assert {token(i) for i in tokenizer.special_ids} == set(CONTROL)
    assert {token(i) for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert tokenizer.special_tokens["bos_token"] == "<|endoftext|>"
    assert tokenizer.chat_templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert len(tokenizer) == len(byte_level["ggml.tokens"]) - 1, "a row of padding is no token"
    assert tokenizer.encode("<think> x") != tokenizer.encode("<think > x")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9"), "Qwen2 normalises to NFC"


def test_sampling_defaults_in_generation_config(byte_level: dict[str, Any], tmp_path: Path) -> None:
    named = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.0, "penalty_repeat": 1.25}
    more = {f"general.sampling.{name}": value for name, value in named.items()}
    path = write(tmp_path / "m.gguf", {**byte_level, "ggml.pre": "qwen2"}, **more)
    actual = text_files(GGUFModel([path]))["generation_config.json"]
    expected = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.0}
    ends = actual.pop("eos_token_id")
    assert actual == {**expected, "repetition_penalty": 1.25}
    assert len(ends) == 2


@pytest.fixture(scope="module")
def scored_bpe() -> dict[str, Any]:
    """Return metadata of a BPE over scores, as of SentencePiece."""
    fast = Fast(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.ByteFallback()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=special, show_progress=False)
    fast.train_from_iterator([TEXTS[0], TEXTS[3], TEXTS[4]] * 3, trainer)
    vocab = json.loads(fast.to_str())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    begin = len(special)
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * begin + [float(-i) for i in range(len(tokens) - begin)],
        "ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - begin)],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def test_scored_tokens_equal_transformers(scored_bpe: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", scored_bpe)
    ours, theirs = tokenizer_of(path), transformers_tokenizer(path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        # SentencePiece and llama.cpp put a blank in front of every text, transformers' class only
        # in front of those that do not begin with one.
        if not text.startswith(" "):
            assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == text
    assert ours.encode("fox")[0] == 1, "a text begins with BOS where the file does not say"
    assert ours.byte(ours.encode("🦊")[-1]) == "🦊".encode()[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.pre": "strange"}, "ggml.pre='strange' is not allowed; allowed: gpt-2.*qwen2"),
        ({"ggml.pre": None}, "ggml.pre=None"),
        ({"ggml.model": "bert"}, "ggml.model='bert' is not allowed; allowed: gpt2, llama"),
        ({"ggml.merges": ["a", "b"]}, "ggml.merges='a' is not allowed; allowed: pairs of tokens"),
        ({"ggml.merges": ["zzz yyy"]}, "ggml.merges='zzz yyy'"),
        ({"ggml.token_type": [1]}, "ggml.token_type=.*allowed: 4.. whole numbers"),
        ({"ggml.tokens": ["a", "a"], "ggml.token_type": [1, 1]}, "tokens=|token_id="),
        ({"ggml.eos_token_id": 1 << 20}, "ggml.eos_token_id=1048576 is not allowed"),
        ({"ggml.add_space_prefix": True}, "ggml.add_space_prefix=True"),
        ({"ggml.add_sep_token": True}, "ggml.add_sep_token=True"),
        ({"chat_templates": True}, "chat_templates=True is not allowed; allowed: a list of texts"),
        ({"ggml.precompiled_charsmap": "x"}, "ggml.precompiled_charsmap='x'"),
    ],
)
def test_unsupported_settings_are_refused(
    changes: dict[str, Any], message: str, byte_level: dict[str, Any], tmp_path: Path
) -> None:
    metadata = {**byte_level, "ggml.pre": "qwen2", **changes}
    path = write(tmp_path / "m.gguf", {k: v for k, v in metadata.items() if v is not None})
    with pytest.raises(CheckpointError, match=message):
        text_files(GGUFModel([path]))
