"""Tool calls as Llama 3.1 to 3.3 write them: the answer is {"name": ..., "parameters": {...}}.

Several stand with semicolons between them. <|python_tag|> may stand in front.
"""

from lockstep.text.parsers.object_calls import ObjectCalls
from lockstep.text.scan import Markers

_OPENERS = {"tag": "<|python_tag|>"}


class Llama3Parser(ObjectCalls):
    """JSON objects with no closing tag; without a tag in front, only at the answer's beginning."""

    SIGNS = ("dictionary of argument name",)
    OPENERS = _OPENERS
    MARKERS = {"start": Markers({"object": "{", **_OPENERS})}
    FIRST = "start"
    ARGUMENTS = "parameters"
    BETWEEN = "; "
    BARE = "{"
    OUTSIDE = ("start", "content", "broken")

    def _bare(self) -> None:
        self._call_begins()

    def _stray(self, text: str, marker: str | None) -> None:
        """Ignore text after a call."""
        if self._index < 0:
            super()._stray(text, marker)
        else:
            self._release("content", text, marker)
