"""Reduced draft vocabulary: a drafter proposes only the most frequent tokens, so its head is short.

Byte-level BPE learns its merges in order of frequency, so the tokens of the first merges are the
most frequent; tokens that were added to the vocabulary (ends, roles, tool calls) are few and always
kept.
"""

import json
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ConfigError, choice_error

HEAD_GRAIN = 64
"""Tokens of which a reduced draft head has a multiple."""
MAX_TOKENS = 1 << 24
"""Upper bound of a vocabulary's tokens."""
AUTO_SIZE = 32_768
"""Tokens of a reduced "auto" draft head."""
AUTO_ABOVE = 65_536
"""Vocabulary size above which "auto" reduces the head."""


def draft_vocab_size(setting: int | str, vocab: int) -> int:
    """Return the tokens that the draft head knows of `vocab`. Raises ConfigError."""
    if setting == "auto":
        return AUTO_SIZE if vocab > AUTO_ABOVE else vocab
    if setting == "full":
        return vocab
    if int(setting) > vocab:
        allowed = f"auto, full, or multiples of {HEAD_GRAIN} up to {vocab}, the model's vocabulary"
        field = "speculative_config draft_vocab_size"
        raise choice_error(ConfigError, field, setting, allowed, "Lower it.")
    return int(setting)


def frequent_tokens(folder: Path, size: int, vocab: int) -> list[int]:
    """Return `size` token ids below `vocab`, ascending: added tokens, then the most frequent ones.

    Without a BPE tokenizer.json in the folder, the lowest ids count as frequent.
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
    """Return token id -> text of the folder's tokenizer.json, added tokens too; None without a
    file.

    Raises CheckpointError where the file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = _json(path)
        vocab = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocab, list):
            vocab = {entry[0]: number for number, entry in enumerate(vocab)}
        texts = {int(number): str(text) for text, number in vocab.items()}
        added = tokenizer.get("added_tokens") or ()
        return texts | {int(token["id"]): str(token["content"]) for token in added}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Fetch the file again, or choose another draft model."
        ) from None


def _added(folder: Path, tokenizer: dict[str, Any]) -> list[int]:
    """Return the end tokens of an answer, then every token that was added to the vocabulary."""
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
    """Return the ids of a BPE model: its alphabet, then what its merges produce, in order."""
    ids = model.get("vocab") or {}
    merges = model.get("merges") or []
    if not merges or not isinstance(ids, dict):
        return []
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    merged = [ids["".join(pair)] for pair in pairs if "".join(pair) in ids]
    # Merges are learned in order of frequency.
    return [*sorted(set(ids.values()) - set(merged)), *merged]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
