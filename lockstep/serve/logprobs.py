"""Log-probabilities in OpenAI's two forms."""

from math import isnan
from typing import Any

from lockstep.outputs import Logprob
from lockstep.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON knows no infinity


def _number(value: float) -> float:
    """A log-probability that JSON can hold. Raises ValueError where it is none."""
    if isnan(value):
        raise ValueError("a log-probability is not a number")
    return max(value, FLOOR)


def _named(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id) if tokenizer else b""
    text = raw.decode("utf-8", "replace") if tokenizer else f"token_id:{token_id}"
    return {"token": text, "logprob": _number(logprob), "bytes": list(raw)}


def _ranked(entry: dict[int, Logprob], most: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens; the chosen one may stand below them."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= most]


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: list[int], entries: list[dict[int, Logprob]], most: int
) -> dict[str, Any]:
    """The chat form: {"content": [{token, logprob, bytes, top_logprobs}, ...]}."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [_named(tokenizer, i, p.logprob) for i, p in _ranked(entry, most)]
        named = _named(tokenizer, token_id, entry[token_id].logprob)
        content.append({**named, "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: list[int],
    entries: list[dict[int, Logprob] | None],
    most: int,
    offset: int = 0,
) -> dict[str, Any]:
    """The completions form: parallel lists. `offset` is the first token's place in the text."""
    found: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = _named(tokenizer, token_id, 0.0)["token"]
        found["tokens"].append(text)
        found["text_offset"].append(offset)
        offset += len(text)
        chosen = entry.get(token_id) if entry else None
        found["token_logprobs"].append(_number(chosen.logprob) if chosen else None)
        top = {
            _named(tokenizer, i, 0.0)["token"]: _number(p.logprob)
            for i, p in (entry or {}).items()
            if p.rank <= most or i == token_id
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
