"""Incremental detokenizer: emits whole characters only and delays what may become a stop string."""

import codecs
from collections.abc import Collection

from lockstep.text.scan import Markers, Scan
from lockstep.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Incremental text of one completion; the emitted parts join to the decoding of all tokens.

    Invalid UTF-8 becomes U+FFFD as soon as it is certain.
    stop: strings that end the text before their match, or after it with include_stop.
    min_tokens: the text of this many first tokens is not searched for stop strings.
    skip_special_tokens: hide special tokens except those in `shown`.

    `stopped` is the stop string that ended the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.difference(shown) if skip_special_tokens else ()
        self._include_stop = include_stop
        self._unchecked = min_tokens
        self._scan = Scan(Markers({s: s for s in stop})) if stop else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: list[int] = []  # previous token: a decoder may depend on it

    def push(self, token_id: int) -> str:
        """Append a token and return the text that became final."""
        text = self._decode(token_id)
        if self._unchecked > 0:
            self._unchecked -= 1
            return text
        return self._until_stop(text, final=False)

    def flush(self) -> str:
        """Return the pending text, after the last token."""
        tail = self._utf8.decode(b"", final=True)
        return self._until_stop(tail, final=True)

    def _decode(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if token_id in self._hidden:
            return ""
        if tokenizer.byte_level:
            return self._utf8.decode(tokenizer.token_bytes(token_id))
        if not tokenizer.token(token_id):  # an id that the vocabulary lacks
            return ""
        last = self._last
        self._last = [token_id]
        byte = tokenizer.byte(token_id)
        if byte is not None:
            return self._utf8.decode(bytes([byte]))
        before = tokenizer.decode(last, skip_special_tokens=False)
        text = tokenizer.decode([*last, token_id], skip_special_tokens=False)
        return self._utf8.decode(b"", final=True) + text[len(before) :]

    def _until_stop(self, text: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        if self._scan is None:
            return text
        text, self.stopped, *_ = self._scan.take(text)
        if self.stopped is not None:
            return text + self.stopped if self._include_stop else text
        return text + self._scan.flush() if final else text
