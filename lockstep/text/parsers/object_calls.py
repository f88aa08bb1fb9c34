"""Calls that are JSON objects with a name and arguments, alone or in a list, in any tags."""

from typing import ClassVar

from lockstep.text.grammars.lark import Rules, Tool, sequence
from lockstep.text.parsers.call_parser import CallParser
from lockstep.text.parsers.json_reader import END, FAULT, JsonCall
from lockstep.text.parsers.schema import to_json
from lockstep.text.scan import Markers

_OBJECT = "{"


class ObjectCalls(CallParser):
    """The grammar without its tags: subclasses name them. Arguments stream once a name is known.

    A subclass's MARKERS are those of its further states. ARGUMENTS: the key that is written.
    """

    ARGUMENTS: ClassVar[str] = "arguments"
    BETWEEN = ", "
    JSON_CALLS = True
    AFTER = "between"
    FILLER = "[],;} \t\r\n"
    """Lists, separators, and a brace too many, which is a slip that many models make."""

    def __init_subclass__(cls) -> None:
        cls.MARKERS = {
            "content": Markers({**cls.OPENERS}),
            "broken": Markers({**cls.OPENERS, **cls.OVER}),
            "between": Markers({"object": _OBJECT, **cls.OPENERS, **cls.OVER}),
            **cls.MARKERS,
        }

    @classmethod
    def head(cls, name: str) -> str:
        """The object's beginning."""
        return f'{{"name": {to_json(name)}, "{cls.ARGUMENTS}": '

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """The object."""
        return sequence(rules.text(cls.head(tool.name)), rules.arguments(tool), rules.text("}"))

    def _opened(self, marker: str) -> None:
        self._enter("between")

    def _in_between(self, text: str, marker: str | None) -> None:
        """Around objects."""
        if text.strip(self.FILLER):
            self._stray(text, marker)
        elif marker == "object":
            self._call_begins()
        elif marker in self.OVER:
            self._enter("content")
        elif marker is not None:
            self._begin(marker)

    def _stray(self, text: str, marker: str | None) -> None:
        """Text stands where only calls should."""
        self._fail("text that is no call", text, marker)

    def _call_begins(self) -> None:
        self._object = JsonCall()
        self._enter("object", self._object)

    def _in_object(self, text: str, marker: str | None) -> None:
        if not self._open and (text or marker == END):
            self._call(self._object.name)
        self._arguments(text)
        if marker == END:
            self._closed()
            self._enter("between")
        elif marker == FAULT:
            self._fail(self._object.fault)
