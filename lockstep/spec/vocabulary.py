"""Which tokens a drafter may propose: the most frequent ones, so that its head is short.

Byte-level BPE learns its merges in order of frequency, so the tokens of the first merges come up
most; tokens that were added to the vocabulary (ends, roles, tool calls) are few and always kept.
"""

import json
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ConfigError, choice_error

HEAD_GRAIN = 64
"""A reduced draft head has a multiple of this many tokens."""
MOST_TOKENS = 1 << 24
"""Tokens of a vocabulary that no model comes near."""
AUTO_SIZE = 32_768
"""Tokens of an "auto" draft head, where it is reduced."""
AUTO_ABOVE = 65_536
"""Tokens of a vocabulary above which "auto" reduces the head."""


def draft_vocab_size(asked: int | str, vocab: int) -> int:
    """Tokens that the draft head knows of `vocab`, as asked. Raises ConfigError."""
    if asked == "auto":
        return AUTO_SIZE if vocab > AUTO_ABOVE else vocab
    if asked == "full":
        return vocab
    if int(asked) > vocab:
        allowed = f"auto, full, or multiples of {HEAD_GRAIN} up to {vocab}, the model's vocabulary"
        field = "speculative_config draft_vocab_size"
        raise choice_error(ConfigError, field, asked, allowed, "Lower it.")
    return int(asked)


def frequent_tokens(folder: Path, size: int, vocab: int) -> list[int]:
    """`size` token ids below `vocab`, ascending: all added tokens, then the most frequent ones.

    Without a tokenizer.json in the folder, or one that is no BPE, the lowest ids count as frequent.
    """
    try:
        tokenizer = _json(folder / "tokenizer.json")
        frequent = [*_added(folder, tokenizer), *_by_merges(tokenizer.get("model") or {})]
        ranked = [*map(int, frequent), *range(vocab)]
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} does not say which tokens are frequent: its tokenizer.json, config.json, "
            f"generation_config.json or tokenizer_config.json cannot be read ({error}). Fetch the "
            "files again, or choose draft_vocab_size full."
        ) from None
    return sorted(list(dict.fromkeys(i for i in ranked if 0 <= i < vocab))[:size])


def token_texts(folder: Path) -> dict[int, str] | None:
    """Token id -> its text in the folder's tokenizer.json, added tokens too; None: there is none.

    Raises CheckpointError where the file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = _json(path)
        vocab = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocab, list):
            vocab = {piece[0]: number for number, piece in enumerate(vocab)}
        texts = {int(number): str(text) for text, number in vocab.items()}
        added = tokenizer.get("added_tokens") or ()
        return texts | {int(token["id"]): str(token["content"]) for token in added}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Fetch the file again, or choose another draft model."
        ) from None


def _added(folder: Path, tokenizer: dict[str, Any]) -> list[int]:
    """The ends of an answer first, then every token that was added to the vocabulary."""
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    ends: list[int] = []
    for part in (generation, config, config.get("text_config") or {}):
        value = part.get("eos_token_id")
        if value is not None:
            ends += value if isinstance(value, list) else [value]
    decoder = _json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    return [
        *ends,
        *(token["id"] for token in tokenizer.get("added_tokens", ())),
        *map(int, decoder),
    ]


def _by_merges(model: dict[str, Any]) -> list[int]:
    """The ids of a BPE model: its alphabet, then what its merges make, in their order."""
    ids = model.get("vocab") or {}
    merges = model.get("merges") or []
    if not merges or not isinstance(ids, dict):
        return []
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    made = [ids["".join(pair)] for pair in pairs if "".join(pair) in ids]
    return [*sorted(set(ids.values()) - set(made)), *made]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
