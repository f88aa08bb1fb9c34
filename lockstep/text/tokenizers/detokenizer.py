"""Tokens to text as they come: whole characters only, stop strings held back until decided."""

import codecs
from collections.abc import Collection

from lockstep.text.scan import Markers, Scan
from lockstep.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """One completion's text. Its pieces, joined, equal the decoding of all tokens at once.

    Bytes that are no UTF-8 become U+FFFD, each as soon as that is certain.
    `stop` ends the text where one of its strings begins, or after it with `include_stop`; text of
    the first `min_tokens` tokens is not searched. Special tokens are left out with
    `skip_special_tokens`, but for those `shown`. `stopped` is the string that ended the text.
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
        self._last: list[int] = []  # the token before, on which a decoder may depend

    def push(self, token_id: int) -> str:
        """The text that one more token settles."""
        piece = self._piece(token_id)
        if self._unchecked > 0:
            self._unchecked -= 1
            return piece
        return self._settle(piece, final=False)

    def flush(self) -> str:
        """What was held back, once no more tokens come."""
        tail = self._utf8.decode(b"", final=True)
        return self._settle(tail, final=True)

    def _piece(self, token_id: int) -> str:
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
        known = tokenizer.decode(last, skip_special_tokens=False)
        text = tokenizer.decode([*last, token_id], skip_special_tokens=False)
        return self._utf8.decode(b"", final=True) + text[len(known) :]

    def _settle(self, piece: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        if self._scan is None:
            return piece
        text, self.stopped, *_ = self._scan.take(piece)
        if self.stopped is not None:
            return text + self.stopped if self._include_stop else text
        return text + self._scan.flush() if final else text
