"""Tool calls of Llama 3.1 to 3.3: the answer is {"name": ..., "parameters": {...}}.

Several calls are separated by semicolons. <|python_tag|> may precede them.
"""

from lockstep.text.parsers.object_calls import ObjectCalls
from lockstep.text.scan import Markers

_OPENERS = {"tag": "<|python_tag|>"}


class Llama3Parser(ObjectCalls):
    """Parser of JSON objects without closing tags; without an opening tag, only at the answer's
    start."""

    SIGNS = ("dictionary of argument name",)
    OPENERS = _OPENERS
    MARKERS = {"start": Markers({"object": "{", **_OPENERS})}
    FIRST = "start"
    ARGUMENTS = "parameters"
    BETWEEN = "; "
    BARE = "{"
    OUTSIDE = ("start", "content", "broken")

    def _bare(self) -> None:
        self._begin_object()

    def _stray(self, text: str, marker: str | None) -> None:
        """Emit text after a call as content."""
        if self._index < 0:
            super()._stray(text, marker)
        else:
            self._release("content", text, marker)
