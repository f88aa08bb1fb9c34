"""Control tokens: strings of a conversation must not become tokens that only the template may
write.

Before rendering, each spelling of a control token in a string is broken by a mark. Marked text is
encoded by a copy of the tokenizer. Its normalizer removes the marks after control tokens were
matched and before all other steps, so that the rest of the text is tokenized as usual.
"""

import json
import re

from tokenizers import Tokenizer as Fast
from tokenizers import normalizers

# Two variation selectors that no script uses. They are printable, so that Python's repr and JSON
# write them unescaped, have no case, and are not whitespace.
_MARK = "\U000e01ef"
_ESCAPE = "\U000e01ee"


class ControlTokens:
    """Added tokens of a tokenizer.

    Special ones are never taken from a string. Others, such as <tool_call>, may be written by
    system prompts and assistants. Blank ones, such as runs of newlines, are text.
    """

    def __init__(self, fast: Fast) -> None:
        self._fast = fast
        added = [t for t in fast.get_added_tokens_decoder().values() if t.content.strip("▁ \t\r\n")]
        special = [t.content for t in added if t.special]
        self._special = _spellings(special, [t.content for t in added if not t.special])
        self._all = _spellings([t.content for t in added])
        # A normalizer may turn other characters into a spelling.
        self._normalizer = fast.normalizer if any(t.normalized for t in added) else None
        # Characters that are escaped in marked text; a mark cannot break a single-character token.
        single = [token for token in special if len(token) == 1]
        self._codes = {c: _ESCAPE + chr(48 + i) for i, c in enumerate([_ESCAPE, _MARK, *single])}
        self._without_marks = self._copy(any(t.normalized for t in added))

    def mark(self, text: str, special_only: bool = False) -> str:
        """Return the text with a mark in each spelling of a control token.

        An incomplete spelling at the end of the text is marked too: the next rendered text could
        complete it. special_only: mark spellings of special tokens only.
        """
        for char, code in self._codes.items():
            text = text.replace(char, code)
        spellings = self._special if special_only else self._all
        if spellings is None:
            return text
        if self._normalizer is not None and spellings.search(self._normalizer.normalize_str(text)):
            text += _MARK
        return spellings.sub(rf"\g<0>{_MARK}", text)

    def unmark(self, text: str) -> str:
        """Return the text without marks."""
        if not self.has_marks(text):
            return text
        text = text.replace(_MARK, "")
        for char, code in reversed(self._codes.items()):
            text = text.replace(code, char)
        return text

    def has_marks(self, text: str) -> bool:
        """Return whether the text has marks."""
        return _MARK in text or _ESCAPE in text

    def encode(self, text: str) -> list[int]:
        """Return the token ids of marked text; broken spellings are plain text."""
        fast = self._without_marks if self.has_marks(text) else self._fast
        return fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def ascii_json(self, text: str) -> str:
        r"""Return JSON text with \u escapes for all characters but ASCII and marks."""
        for char, code in reversed(self._codes.items()):
            if not char.isascii():
                text = text.replace(code, json.dumps(char)[1:-1])
        unescaped = _MARK + _ESCAPE
        return "".join(c if c.isascii() or c in unescaped else json.dumps(c)[1:-1] for c in text)

    def _copy(self, normalized: bool) -> Fast:
        """Return a tokenizer that removes marks right after matching added tokens.

        It matches all added tokens before normalizing, including those defined on normalized text.
        """
        text = self._fast.to_str()
        if normalized:
            state = json.loads(text)
            for token in state["added_tokens"]:
                token["normalized"] = False
            text = json.dumps(state)
        fast = Fast.from_str(text)
        steps = [normalizers.Replace(_MARK, "")]
        steps += [normalizers.Replace(code, c) for c, code in reversed(self._codes.items())]
        original = [] if fast.normalizer is None else [fast.normalizer]
        fast.normalizer = normalizers.Sequence([*steps, *original])
        return fast


def _spellings(tokens: list[str], spared: list[str] | None = None) -> re.Pattern[str] | None:
    """Return a regex of a token's first character if its second, or the end of the text, follows.

    The regex also matches beginnings that the next rendered text would complete, but none of the
    spared tokens. Tokens that begin like a word are matched whole, so that words are unchanged.
    """
    choices: dict[str, set[str]] = {}
    for token in tokens:
        if len(token) > 1:
            is_word = token[:2].isalnum()
            rest = re.escape(token[1:]) if is_word else re.escape(token[1])
            choices.setdefault(token[0], set()).update({rest} if is_word else {rest, r"\Z"})
    patterns = []
    for first, rests in sorted(choices.items()):
        kept = [s[1:] for s in spared or () if s[0] == first and len(s) > 1]
        kept = [rest for rest in kept if not any(t.startswith(first + rest) for t in tokens)]
        lookahead = f"(?!(?-i:{'|'.join(map(re.escape, kept))}))" if kept else ""
        patterns.append(f"{re.escape(first)}{lookahead}(?={'|'.join(sorted(rests))})")
    return re.compile("|".join(patterns), re.IGNORECASE) if patterns else None
