"""Control tokens: what a conversation's strings spell must not become what only a template writes.

Before rendering, whatever a string holds of a control token's spelling is broken by a mark. Text
with marks is encoded by a copy of the tokenizer whose normalizer takes them out, after control
tokens were looked for and before anything else, so that all else is tokenised as ever.
"""

import json
import re

from tokenizers import Tokenizer as Fast
from tokenizers import normalizers

# Two of the variation selectors that no script uses: they are printable, so that Python's repr and
# JSON show them as they are, have no case, and are no whitespace.
_MARK = "\U000e01ef"
_ESCAPE = "\U000e01ee"


class ControlTokens:
    """The added tokens of a tokenizer.

    `special` ones never come from a string; the others, such as <tool_call>, are written by system
    prompts and assistants too. Blank ones, such as runs of newlines, are text.
    """

    def __init__(self, fast: Fast) -> None:
        self._fast = fast
        added = [t for t in fast.get_added_tokens_decoder().values() if t.content.strip("▁ \t\r\n")]
        special = [t.content for t in added if t.special]
        self._special = _spellings(special, [t.content for t in added if not t.special])
        self._all = _spellings([t.content for t in added])
        # A normalizer may make a spelling out of other characters.
        self._normalizer = fast.normalizer if any(t.normalized for t in added) else None
        # Characters that stand for themselves only behind an escape; a mark cannot break the last.
        single = [token for token in special if len(token) == 1]
        self._codes = {c: _ESCAPE + chr(48 + i) for i, c in enumerate([_ESCAPE, _MARK, *single])}
        self._without_marks = self._copy(any(t.normalized for t in added))

    def mark(self, text: str, special_only: bool = False) -> str:
        """The text with marks where it spells control tokens, or begins to at its end."""
        for char, code in self._codes.items():
            text = text.replace(char, code)
        spellings = self._special if special_only else self._all
        if spellings is None:
            return text
        if self._normalizer is not None and spellings.search(self._normalizer.normalize_str(text)):
            text += _MARK
        return spellings.sub(rf"\g<0>{_MARK}", text)

    def unmark(self, text: str) -> str:
        """The text as it was before it was marked."""
        if not self.marks(text):
            return text
        text = text.replace(_MARK, "")
        for char, code in reversed(self._codes.items()):
            text = text.replace(code, char)
        return text

    def marks(self, text: str) -> bool:
        """Whether the text holds marks."""
        return _MARK in text or _ESCAPE in text

    def encode(self, text: str) -> list[int]:
        """Token ids of marked text; no spelling that was broken is a control token."""
        fast = self._without_marks if self.marks(text) else self._fast
        return fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def ascii_json(self, text: str) -> str:
        r"""JSON text with \u escapes for all that is not ASCII but marks, which stay marks."""
        for char, code in reversed(self._codes.items()):
            if not char.isascii():
                text = text.replace(code, json.dumps(char)[1:-1])
        kept = _MARK + _ESCAPE
        return "".join(c if c.isascii() or c in kept else json.dumps(c)[1:-1] for c in text)

    def _copy(self, normalized: bool) -> Fast:
        """The tokenizer, but it takes marks out once it has looked for added tokens.

        It looks for all of them before it normalizes, also for those meant to be found afterwards.
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
        own = [] if fast.normalizer is None else [fast.normalizer]
        fast.normalizer = normalizers.Sequence([*steps, *own])
        return fast


def _spellings(tokens: list[str], spared: list[str] | None = None) -> re.Pattern[str] | None:
    """Finds a token's first character where its second, or the end of the text, comes next.

    That finds more than whole tokens, also those that only what is rendered next would complete,
    but not where a spared one stands. A token that begins like a word is only found whole, so that
    words stay as they are.
    """
    choices: dict[str, set[str]] = {}
    for token in tokens:
        if len(token) > 1:
            word = token[:2].isalnum()
            rest = re.escape(token[1:]) if word else re.escape(token[1])
            choices.setdefault(token[0], set()).update({rest} if word else {rest, r"\Z"})
    found = []
    for first, rests in sorted(choices.items()):
        kept = [s[1:] for s in spared or () if s[0] == first and len(s) > 1]
        kept = [rest for rest in kept if not any(t.startswith(first + rest) for t in tokens)]
        but = f"(?!(?-i:{'|'.join(map(re.escape, kept))}))" if kept else ""
        found.append(f"{re.escape(first)}{but}(?={'|'.join(sorted(rests))})")
    return re.compile("|".join(found), re.IGNORECASE) if found else None
