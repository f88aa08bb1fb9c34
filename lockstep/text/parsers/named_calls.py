"""Calls that are a name, a separator, and JSON arguments, in tags of their own."""

from typing import ClassVar

from lockstep.text.parsers.calls import CallParser
from lockstep.text.parsers.json_reader import END, FAULT, JsonValue
from lockstep.text.parsers.writing import Rules, Tool, sequence
from lockstep.text.scan import Markers


class NamedCalls(CallParser):
    """Grammar without its tags: subclasses define them and the position of the name.

    OPENERS: "call" begins a call; others surround calls and mean nothing. SEPARATOR: text between a
    name and its arguments. LEAD, TRAIL: text before and after the name. LAST: text after the
    arguments.
    """

    SEPARATOR: ClassVar[str]
    LEAD: ClassVar[str] = ""
    TRAIL: ClassVar[str]
    LAST: ClassVar[str] = ""
    AFTER = "tail"

    def __init_subclass__(cls) -> None:
        around = {**cls.OPENERS, **cls.OVER}
        cls.MARKERS = {
            "content": Markers({**cls.OPENERS}),
            "broken": Markers(around),
            "header": Markers({"separator": cls.SEPARATOR, **around}),
            "tail": Markers(around),
        }

    @classmethod
    def head(cls, name: str) -> str:
        """The name and what stands around it."""
        return f"{cls.LEAD}{name}{cls.TRAIL}"

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """The name, and the arguments behind it."""
        head = rules.text(cls.head(tool.name))
        return sequence(head, rules.arguments(tool), rules.text(cls.LAST))

    def _named(self, header: str) -> tuple[str, str | None]:
        """A call's name, "" where there is none, and its id, out of the text in front of them."""
        return header.strip(), None

    def _opened(self, marker: str) -> None:
        self._header: list[str] = []
        self._enter("header" if marker == "call" else "content")

    def _in_header(self, text: str, marker: str | None) -> None:
        self._header.append(text)
        if marker is None:
            return
        if marker != "separator":
            self._fail("a call without arguments", "", marker)
            return
        self._name, self._id = self._named("".join(self._header))
        if not self._name:
            self._fail("a call without a name")
            return
        self._value = JsonValue("{")
        self._enter("arguments", self._value)

    def _in_arguments(self, text: str, marker: str | None) -> None:
        if text and not self._open:
            self._call(self._name, self._id)
        self._arguments(text)
        if marker == END:
            self._closed()
            self._enter("tail")
        elif marker == FAULT:
            self._fail(self._value.fault)

    def _in_tail(self, text: str, marker: str | None) -> None:
        """Read text after arguments."""
        if text.strip(self.FILLER):
            self._fail("text behind arguments", text, marker)
        elif marker in self.OVER:
            self._enter("content")
        elif marker is not None:
            self._begin(marker)
