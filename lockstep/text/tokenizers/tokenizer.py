"""The tokenizer of a model folder: `tokenizer.json` plus what the config files say about it."""

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

MOST_KNOWN = 1 << 16
"""Tokens whose bytes are kept."""
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
"""Setting that gives further tokens names, which are variables of the chat template too."""


def eos_ids(folder: Path, own: int | None = None) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's own, and those of the config files.

    Raises CheckpointError.
    """
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    size = inner.get("vocab_size", config.get("vocab_size"))
    size = size if isinstance(size, int) else 2**31
    found = set() if own is None else {own}
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
        found.update(ids)
    if len(found) > MAX_EOS_IDS:
        raise damaged(
            folder / "generation_config.json",
            f"with config.json and tokenizer_config.json, eos_token_id names {sorted(found)}; "
            f"allowed: at most {MAX_EOS_IDS} tokens that end an answer",
        )
    return frozenset(found)


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: each of 256 printable characters stands for a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """Text to token ids and back. `eos_ids`: the tokens that end an answer.

    Raises CheckpointError, which names the file, where a file is missing or damaged.
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
        own = self.fast.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = eos_ids(self._folder, own)
        self._missing = self._missing_ends()
        self.chat_templates, self.chat_template_path = read_templates(self._folder)
        decoder = json.loads(self.fast.decoder.__getstate__()) if self.fast.decoder else {}
        parts = [decoder, *decoder.get("decoders", ())]
        self.byte_level = any(part.get("type") == "ByteLevel" for part in parts)
        self._byte_fallback = any(part.get("type") == "ByteFallback" for part in parts)
        self._byte_of_char = _byte_of_char()
        self._known_bytes = lru_cache(MOST_KNOWN)(self._bytes_of)

    def _load(self, path: Path) -> Fast:
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; a model folder holds tokenizer.json. "
                "Add it, or set skip_tokenizer_init to work with token ids."
            )
        try:
            fast = Fast.from_str(read_text(path))
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises no other kind
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
        """Return the ids of bos_token and eos_token that raw texts get besides tokenizer.json's.

        add_bos_token and add_eos_token ask for them. tokenizer.json may add such a token itself. A
        chat template writes its own.
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
        more = read_json(path)
        found = {}
        extra = self.config.get(_EXTRA)
        named = extra if isinstance(extra, dict) else {}
        for name in (*_SPECIAL, *named):
            value = self.config.get(name) or named.get(name) or more.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if content and not is_text(content):
                place = self._config_path if self.config.get(name) else path
                raise damaged(place, f"{name}={brief(value)}; allowed: a text")
            if content:
                found[name] = content
        return found

    @property
    def chat_template(self) -> str | None:
        """The template of requests without tools."""
        return self.chat_templates.get(DEFAULT)

    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return self.fast.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Most characters that one token stands for."""
        return max(map(len, self.fast.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; special tokens written in it become themselves.

        As a batch of one, since `encode` itself would keep all other threads waiting.
        """
        batch = self.fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        if not add_special_tokens:
            return ids
        return [*self._missing["bos_token"], *ids, *self._missing["eos_token"]]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; what is no UTF-8 becomes U+FFFD."""
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token; "" for an id that it does not have."""
        return self.fast.id_to_token(token_id) or ""

    def byte(self, token_id: int) -> int | None:
        """The byte that a token such as <0xE2> stands for, where the decoder knows such tokens."""
        found = _BYTE.fullmatch(self.token(token_id)) if self._byte_fallback else None
        return int(found[1], 16) if found else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in the midst of a text, with a blank in front where it
        has one; b"" for an id outside the vocabulary."""
        return self._known_bytes(token_id)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if (byte := self.byte(token_id)) is not None:
            return bytes([byte])
        if not self.byte_level:  # decoders may take a text's own first blank away
            first = self.decode([token_id], skip_special_tokens=False)
            both = self.decode([token_id, token_id], skip_special_tokens=False)
            return both[len(first) :].encode()
        codes = [self._byte_of_char.get(char) for char in token]
        known = [code for code in codes if code is not None]
        return bytes(known) if len(known) == len(codes) else token.encode()
