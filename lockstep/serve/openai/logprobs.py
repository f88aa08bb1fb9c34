"""Log-probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from math import isnan
from typing import Any

from lockstep.outputs import Logprob
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON knows no infinity


def _number(value: float) -> float:
    """A log-probability that JSON can hold. Raises ValueError where it is none."""
    if isnan(value):
        raise ValueError("a log-probability is not a number")
    return max(value, FLOOR)


def _named(
    tokenizer: Tokenizer | None, token_id: int, logprob: float, as_ids: bool
) -> dict[str, Any]:
    """Return one token's entry. as_ids: write `token_id:N`, since several tokens may share a
    text."""
    raw = tokenizer.token_bytes(token_id) if tokenizer else b""
    text = f"token_id:{token_id}" if as_ids or not tokenizer else raw.decode("utf-8", "replace")
    return {"token": text, "logprob": _number(logprob), "bytes": list(raw)}


def _ranked(entry: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens; the chosen one may stand below them."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top]


def chat_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: list[int],
    entries: list[dict[int, Logprob]],
    num_top: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return the chat form: {"content": [{token, logprob, bytes, top_logprobs}, ...]}.

    as_ids: tokens are written as `token_id:N`.
    """
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [_named(tokenizer, i, p.logprob, as_ids) for i, p in _ranked(entry, num_top)]
        named = _named(tokenizer, token_id, entry[token_id].logprob, as_ids)
        content.append({**named, "top_logprobs": top})
    return {"content": content, "refusal": None}


class Places:
    """Where tokens begin in the text that they are: characters in front of each. A character of
    several tokens counts behind the last of them. hides_special: special tokens are no part of the
    text. begin: characters in front of all of it."""

    def __init__(self, tokenizer: Tokenizer | None, hides_special: bool, begin: int = 0) -> None:
        self.characters = begin
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, skip_special_tokens=hides_special)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self.characters)
            self.characters += len(self._text.push(token_id)) if self._text else 0
        return found


def prompt_places(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Where a prompt's tokens begin in its text. The tokenizer may have put some in front of it."""
    places = Places(tokenizer, hides_special=False)
    found = places.of(token_ids)
    in_front = max(0, places.characters - len(text))
    return [max(0, place - in_front) for place in found]


def completion_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: list[int],
    entries: list[dict[int, Logprob] | None],
    num_top: int,
    places: list[int],
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return the completions form: parallel lists. places: where each token begins in the text.

    as_ids: tokens are written as `token_id:N`.
    """
    found: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": places,
    }
    for token_id, entry in zip(token_ids, entries, strict=True):
        found["tokens"].append(_named(tokenizer, token_id, 0.0, as_ids)["token"])
        chosen = entry.get(token_id) if entry else None
        found["token_logprobs"].append(_number(chosen.logprob) if chosen else None)
        top = {
            _named(tokenizer, i, 0.0, as_ids)["token"]: _number(p.logprob)
            for i, p in (entry or {}).items()
            if p.rank <= num_top or i == token_id
        }
        found["top_logprobs"].append(top if entry else None)
    return found


def prompt_logprobs(
    entries: list[dict[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: per prompt token, {token id: {logprob, rank, decoded_token}}."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(i): {
                "logprob": _number(p.logprob),
                "rank": p.rank,
                "decoded_token": p.decoded_token,
            }
            for i, p in entry.items()
        }
        for entry in entries
    ]
