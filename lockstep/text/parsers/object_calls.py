"""Tool calls written as JSON objects with a name and arguments, alone or in a list, in any tags."""

from typing import ClassVar

from lockstep.text.grammars.lark import Rules, Tool, sequence
from lockstep.text.parsers.call_parser import CallParser
from lockstep.text.parsers.json_reader import END, FAULT, JsonCall
from lockstep.text.parsers.schema import to_json
from lockstep.text.scan import Markers

_OBJECT = "{"


class ObjectCalls(CallParser):
    """Parser without tags: subclasses define them. Arguments stream once the name is known.

    A subclass's MARKERS are those of its further states. ARGUMENTS: key of the arguments.
    """

    ARGUMENTS: ClassVar[str] = "arguments"
    BETWEEN = ", "
    JSON_CALLS = True
    AFTER = "between"
    FILLER = "[],;} \t\r\n"
    """Lists, separators, and an extra brace, which is a slip that many models make."""

    def __init_subclass__(cls) -> None:
        cls.MARKERS = {
            "content": Markers({**cls.OPENERS}),
            "broken": Markers({**cls.OPENERS, **cls.CLOSERS}),
            "between": Markers({"object": _OBJECT, **cls.OPENERS, **cls.CLOSERS}),
            **cls.MARKERS,
        }

    @classmethod
    def head(cls, name: str) -> str:
        """Return the beginning of the object."""
        return f'{{"name": {to_json(name)}, "{cls.ARGUMENTS}": '

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """Return the whole object."""
        return sequence(rules.text(cls.head(tool.name)), rules.arguments(tool), rules.text("}"))

    def _opened(self, marker: str) -> None:
        self._enter("between")

    def _in_between(self, text: str, marker: str | None) -> None:
        """Read text around objects."""
        if text.strip(self.FILLER):
            self._stray(text, marker)
        elif marker == "object":
            self._begin_object()
        elif marker in self.CLOSERS:
            self._enter("content")
        elif marker is not None:
            self._begin(marker)

    def _stray(self, text: str, marker: str | None) -> None:
        """Handle text where only calls are allowed."""
        self._fail("text that is not a call", text, marker)

    def _begin_object(self) -> None:
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
