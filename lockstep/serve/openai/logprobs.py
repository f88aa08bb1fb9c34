"""Log-probabilities in OpenAI's forms for chat and for text completions."""

from collections.abc import Sequence
from math import isnan

from lockstep.outputs import Logprob
from lockstep.serve.openai.schema import (
    ChatLogprobs,
    ChosenTokenLogprob,
    PromptLogprobList,
    TextLogprobs,
    TokenLogprob,
)
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity


def _finite(value: float) -> float:
    """Return a log-probability as JSON can express it. Raises ValueError for NaN."""
    if isnan(value):
        raise ValueError("a log-probability is not a number")
    return max(value, MIN_LOGPROB)


def _token_logprob(
    tokenizer: Tokenizer | None, token_id: int, logprob: float, as_ids: bool
) -> TokenLogprob:
    """Return one token's entry. as_ids: write `token_id:N`, since tokens may have equal texts."""
    raw = tokenizer.token_bytes(token_id) if tokenizer else b""
    text = f"token_id:{token_id}" if as_ids or not tokenizer else raw.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _text_name(tokenizer: Tokenizer | None, token_id: int, as_ids: bool) -> str:
    """Return a token's name in text completions, where names are keys.

    A part of a character is named by its bytes, as OpenAI names it (`bytes:\\xf0\\x9f`), since the
    texts of all such tokens are equal.
    """
    if tokenizer and not as_ids:
        raw = tokenizer.token_bytes(token_id)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return _token_logprob(tokenizer, token_id, 0.0, as_ids)["token"]


def _likeliest(entry: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """Return the num_top likeliest tokens by rank. The chosen token may have a lower rank."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top]


def chat_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: list[int],
    entries: list[dict[int, Logprob]],
    num_top: int,
    as_ids: bool = False,
) -> ChatLogprobs:
    """Return the form of chat completions.

    entries: log-probabilities at each token's position. as_ids: write tokens as `token_id:N`.
    """
    content: list[ChosenTokenLogprob] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [
            _token_logprob(tokenizer, top_id, logprob.logprob, as_ids)
            for top_id, logprob in _likeliest(entry, num_top)
        ]
        chosen = _token_logprob(tokenizer, token_id, entry[token_id].logprob, as_ids)
        content.append({**chosen, "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextOffsets:
    """Counter of the characters before each token of a text.

    A character that several tokens form counts at the last of them. skips_special: special tokens
    are not part of the text. begin: characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer | None, skips_special: bool, begin: int = 0) -> None:
        self.num_characters = begin
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips_special)

    def advance(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.num_characters)
            if self._detokenizer is not None:
                self.num_characters += len(self._detokenizer.push(token_id))
        return offsets


def prompt_offsets(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the characters before each token of a prompt in its text."""
    counter = TextOffsets(tokenizer, skips_special=False)
    offsets = counter.advance(token_ids)
    # Special tokens that the tokenizer adds at the beginning are not part of the client's text.
    num_added = max(0, counter.num_characters - len(text))
    return [max(0, offset - num_added) for offset in offsets]


def text_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: list[int],
    entries: list[dict[int, Logprob] | None],
    num_top: int,
    offsets: list[int],
    as_ids: bool = False,
) -> TextLogprobs:
    """Return the form of text completions: parallel lists.

    offsets: characters before each token. as_ids: write tokens as `token_id:N`.
    """
    logprobs: TextLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": offsets,
    }
    for token_id, entry in zip(token_ids, entries, strict=True):
        logprobs["tokens"].append(_text_name(tokenizer, token_id, as_ids))
        chosen = entry.get(token_id) if entry else None
        logprobs["token_logprobs"].append(_finite(chosen.logprob) if chosen else None)
        top = {
            _text_name(tokenizer, top_id, as_ids): _finite(logprob.logprob)
            for top_id, logprob in _likeliest(entry or {}, num_top)
        }
        if chosen:
            # It may be below the likeliest, and of equal names its own log-probability counts.
            top[logprobs["tokens"][-1]] = _finite(chosen.logprob)
        logprobs["top_logprobs"].append(top if entry else None)
    return logprobs


def prompt_logprobs(entries: list[dict[int, Logprob] | None] | None) -> PromptLogprobList | None:
    """Return vLLM's form: for each prompt token, its alternatives by token id."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in entry.items()
        }
        for entry in entries
    ]
