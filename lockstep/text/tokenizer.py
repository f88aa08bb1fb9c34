"""The tokenizer of a model folder: `tokenizer.json` plus what the config files say about it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from lockstep.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: each of 256 printable characters stands for a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """Text to token ids and back. `eos_ids`: the tokens that end an answer."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; a model folder holds tokenizer.json. "
                "Add it, or set skip_tokenizer_init to work with token ids."
            )
        self.fast = Fast.from_file(str(path))
        self.config = read_json(folder / "tokenizer_config.json")
        self._add_tokens(self.config.get("added_tokens_decoder", {}))
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = self._special_tokens(read_json(folder / "special_tokens_map.json"))
        self.eos_ids = self._eos_ids(folder)
        jinja = folder / "chat_template.jinja"
        self.chat_template = (
            jinja.read_text(encoding="utf-8") if jinja.is_file() else self._template()
        )
        decoder = json.loads(self.fast.to_str()).get("decoder") or {}
        parts = [decoder, *decoder.get("decoders", ())]
        self.byte_level = any(part.get("type") == "ByteLevel" for part in parts)
        self._byte_of_char = _byte_of_char()

    def _add_tokens(self, decoder: dict[str, dict[str, Any]]) -> None:
        for key in sorted(decoder, key=int):
            entry = decoder[key]
            if self.fast.token_to_id(entry["content"]) is None:
                special = bool(entry.get("special"))
                self.fast.add_tokens([AddedToken(entry["content"], special=special)])

    def _special_tokens(self, more: dict[str, Any]) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self.config.get(name) or more.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if content:
                found[name] = content
        return found

    def _eos_ids(self, folder: Path) -> frozenset[int]:
        config = read_json(folder / "config.json")
        values = [
            read_json(folder / "generation_config.json").get("eos_token_id"),
            config.get("eos_token_id"),
            (config.get("text_config") or {}).get("eos_token_id"),
            self.fast.token_to_id(self.special_tokens.get("eos_token", "")),
        ]
        lists = [v if isinstance(v, list) else [v] for v in values if v is not None]
        return frozenset(i for ids in lists for i in ids)

    def _template(self) -> str | None:
        template = self.config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            return named.get("default")
        return template

    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return self.fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; special tokens written in it become themselves."""
        return self.fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; what is no UTF-8 becomes U+FFFD."""
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token; "" for an id that it does not have."""
        return self.fast.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" for an id outside the vocabulary."""
        token = self.token(token_id)
        if not self.byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode()
        codes = [self._byte_of_char.get(char) for char in token]
        known = [code for code in codes if code is not None]
        return bytes(known) if len(known) == len(codes) else token.encode()
