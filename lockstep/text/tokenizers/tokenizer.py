"""Tokenizer of a model folder: `tokenizer.json` and the settings of its config files."""

import json
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from lockstep.errors import CheckpointError, brief
from lockstep.sampling_params import MAX_EOS_IDS
from lockstep.text.model_files import damaged, is_text, read_json, read_text
from lockstep.text.templates.files import DEFAULT, read_templates
from lockstep.text.tokenizers.tokenizer_config import check_tokenizer_config

MAX_CACHED_TOKENS = 1 << 16
"""Maximum tokens whose bytes are cached."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_EXTRA = "extra_special_tokens"
"""Setting that names further special tokens; the names are variables of the chat template too."""


def eos_ids(folder: Path, tokenizer_eos: int | None = None) -> frozenset[int]:
    """Return the tokens that end an answer: tokenizer_eos and those of the config files.

    tokenizer_eos: id of the tokenizer's eos_token, None without one.
    Raises: CheckpointError.
    """
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    size = inner.get("vocab_size", config.get("vocab_size"))
    size = size if isinstance(size, int) else 2**31
    ids_so_far = set() if tokenizer_eos is None else {tokenizer_eos}
    for name, settings in (
        ("generation_config.json", read_json(folder / "generation_config.json")),
        ("config.json", config),
        ("config.json", inner),
    ):
        value = settings.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MAX_EOS_IDS or not all(type(i) is int and 0 <= i < size for i in ids):
            raise damaged(
                folder / name,
                f"eos_token_id={brief(value)}; allowed: a token id below {size}, or a list of at "
                f"most {MAX_EOS_IDS}",
            )
        ids_so_far.update(ids)
    if len(ids_so_far) > MAX_EOS_IDS:
        raise damaged(
            folder / "generation_config.json",
            f"with config.json and tokenizer_config.json, eos_token_id names {sorted(ids_so_far)}; "
            f"allowed: at most {MAX_EOS_IDS} tokens that end an answer",
        )
    return frozenset(ids_so_far)


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: printable character -> byte, 256 entries."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


class Tokenizer:
    """Conversion of text to token ids and back. `eos_ids`: the tokens that end an answer.

    Raises: CheckpointError, which names the file that is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._config_path = self._folder / "tokenizer_config.json"
        self.fast = self._load(self._folder / "tokenizer.json")
        self.config = read_json(self._config_path)
        check_tokenizer_config(self._config_path, self.config, self.fast)
        self._add_tokens(self.config.get("added_tokens_decoder", {}))
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = self._special_tokens()
        eos = self.fast.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = eos_ids(self._folder, eos)
        self._missing = self._missing_ends()
        self.chat_templates, self.chat_template_path = read_templates(self._folder)
        decoder = json.loads(self.fast.decoder.__getstate__()) if self.fast.decoder else {}
        decoders = [decoder, *decoder.get("decoders", ())]
        self.byte_level = any(part.get("type") == "ByteLevel" for part in decoders)
        self._byte_fallback = any(part.get("type") == "ByteFallback" for part in decoders)
        self._byte_of_char = _byte_of_char()
        self._known_bytes = lru_cache(MAX_CACHED_TOKENS)(self._bytes_of)

    def _load(self, path: Path) -> Fast:
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; a model folder needs tokenizer.json. "
                "Add it, or set skip_tokenizer_init to work with token ids."
            )
        try:
            fast = Fast.from_str(read_text(path))
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise damaged(path, error) from None
        fast.no_truncation()
        fast.no_padding()
        return fast

    def _add_tokens(self, decoder: Any) -> None:
        if not isinstance(decoder, dict):
            raise damaged(self._config_path, f"added_tokens_decoder={brief(decoder)}")
        for key, entry in decoder.items():
            known = key.isascii() and key.isdigit() and len(key) < 10 and isinstance(entry, dict)
            if not known or not is_text(entry.get("content")) or not entry["content"]:
                raise damaged(
                    self._config_path, f"added_tokens_decoder has {brief(key)}: {brief(entry)}"
                )
        for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
            if self.fast.token_to_id(entry["content"]) is None:
                special = bool(entry.get("special"))
                self.fast.add_tokens([AddedToken(entry["content"], special=special)])

    def _missing_ends(self) -> dict[str, list[int]]:
        """Return the ids of bos_token and eos_token that encode() must add to raw texts.

        add_bos_token and add_eos_token ask for them. tokenizer.json may add such a token itself,
        and a chat template writes its own.
        """
        added = self.fast.encode("").ids
        missing: dict[str, list[int]] = {"bos_token": [], "eos_token": []}
        for name in missing:
            token = self.special_tokens.get(name)
            if not self.config.get(f"add_{name}") or token is None:
                continue
            token_id = self.fast.token_to_id(token)
            if token_id is None:
                raise damaged(
                    self._config_path, f"add_{name}=true, but tokenizer.json has no {brief(token)}"
                )
            missing[name] = [] if token_id in added else [token_id]
        return missing

    def _special_tokens(self) -> dict[str, str]:
        path = self._folder / "special_tokens_map.json"
        map_file = read_json(path)
        texts = {}
        extra = self.config.get(_EXTRA)
        named = extra if isinstance(extra, dict) else {}
        for name in (*_SPECIAL, *named):
            value = self.config.get(name) or named.get(name) or map_file.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if content and not is_text(content):
                file = self._config_path if self.config.get(name) else path
                raise damaged(file, f"{name}={brief(value)}; allowed: a text")
            if content:
                texts[name] = content
        return texts

    @property
    def chat_template(self) -> str | None:
        """Return the template of requests without tools."""
        return self.chat_templates.get(DEFAULT)

    def __len__(self) -> int:
        """Return the size of the vocabulary, added tokens included."""
        return self.fast.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_length(self) -> int:
        """Return the characters of the longest token."""
        return max(map(len, self.fast.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; special tokens written in it are parsed.

        It encodes a batch of one, since `encode` of tokenizers keeps the GIL.
        """
        batch = self.fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        if not add_special_tokens:
            return ids
        return [*self._missing["bos_token"], *ids, *self._missing["eos_token"]]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD."""
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token; "" for an unknown id."""
        return self.fast.id_to_token(token_id) or ""

    def byte(self, token_id: int) -> int | None:
        """Return the byte of a byte-fallback token such as <0xE2>; None for other tokens."""
        match = _BYTE.fullmatch(self.token(token_id)) if self._byte_fallback else None
        return int(match[1], 16) if match else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text, with its leading blank; b"" for an unknown
        id."""
        return self._known_bytes(token_id)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if (byte := self.byte(token_id)) is not None:
            return bytes([byte])
        if not self.byte_level:  # decoders may strip a text's leading blank
            first = self.decode([token_id], skip_special_tokens=False)
            both = self.decode([token_id, token_id], skip_special_tokens=False)
            return both[len(first) :].encode()
        codes = [self._byte_of_char.get(char) for char in token]
        byte_values = [code for code in codes if code is not None]
        return bytes(byte_values) if len(byte_values) == len(codes) else token.encode()
