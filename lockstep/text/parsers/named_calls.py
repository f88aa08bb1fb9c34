"""Tool calls written as a name, a separator and JSON arguments, in tags."""

from typing import Any, ClassVar

from lockstep.text.grammars.lark import Rules, Tool, sequence
from lockstep.text.parsers.call_parser import CallParser
from lockstep.text.parsers.events import CallError
from lockstep.text.parsers.json_reader import END, FAULT, JsonValue
from lockstep.text.scan import Markers


class NamedCalls(CallParser):
    """Parser without tags: subclasses define them and the position of the name.

    OPENERS: "call" begins a call; names that end in "_end" end a section of calls, others begin
    one.
    SEPARATOR: text between a name and its arguments.
    LEAD, TRAIL: text before and after the name.
    LAST: text after the arguments.

    In a section a call may lack its own tags: a single word and the separator begin it too.
    """

    SEPARATOR: ClassVar[str]
    LEAD: ClassVar[str] = ""
    TRAIL: ClassVar[str]
    LAST: ClassVar[str] = ""
    JSON_CALLS = True
    AFTER = "tail"
    FILLER = "} \t\r\n"
    """Characters to ignore after arguments. An extra brace is a slip that many models make."""

    def __init_subclass__(cls) -> None:
        markers = {**cls.OPENERS, **cls.CLOSERS}
        cls.MARKERS = {
            "content": Markers({**cls.OPENERS}),
            "broken": Markers(markers),
            "header": Markers({"separator": cls.SEPARATOR, **markers}),
            "section": Markers({"separator": cls.SEPARATOR, **markers}),
            "tail": Markers(markers),
        }

    @classmethod
    def head(cls, name: str) -> str:
        """Return the name with the text around it."""
        return f"{cls.LEAD}{name}{cls.TRAIL}"

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """Return the name and the arguments."""
        head = rules.text(cls.head(tool.name))
        return sequence(head, rules.arguments(tool), rules.text(cls.LAST))

    def _parse_header(self, header: str) -> tuple[str, str | None]:
        """Return a call's name ("" if there is none) and its id from the text before the
        arguments."""
        return header.strip(), None

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self._header: list[str] = []  # text before a separator
        self._in_calls = False  # inside of a section of calls

    def _opened(self, marker: str) -> None:
        self._header.clear()
        if marker == "call":
            self._enter("header")
            return
        self._in_calls = not marker.endswith("_end")
        self._leave()

    def _leave(self) -> None:
        """Enter the state that surrounds a call."""
        self._header.clear()
        self._raw.clear()
        self._enter("section" if self._in_calls else "content")

    def _in_section(self, text: str, marker: str | None) -> None:
        """Read text between the calls of a section: a name without a tag, or content."""
        self._header.append(text)
        if marker is None:
            return
        header = "".join(self._header)
        name, call_id = self._parse_header(header) if marker == "separator" else ("", None)
        if len(name.split()) == 1:
            self._begin_arguments(name, call_id)
            return
        self._content(header + (self.SEPARATOR if marker == "separator" else ""))
        if marker in self.OPENERS:
            self._begin(marker)
        else:
            self._leave()

    def _finish(self, why: str) -> None:
        if self._state != "section":
            super()._finish(why)
            return
        rest = "".join(self._header) + self._reader.flush()
        if rest.strip():
            self._events.append(CallError(why))
        self._enter("content")
        self._content(rest)

    def _in_header(self, text: str, marker: str | None) -> None:
        self._header.append(text)
        if marker is None:
            return
        if marker != "separator":
            self._fail("a call without arguments", "", marker)
            return
        name, call_id = self._parse_header("".join(self._header))
        if not name:
            self._fail("a call without a name")
            return
        self._begin_arguments(name, call_id)

    def _begin_arguments(self, name: str, call_id: str | None) -> None:
        self._name, self._id = name, call_id
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
        """Read what follows arguments: a closing tag, or the next call of a section."""
        if text.strip(self.FILLER) and self._in_calls:
            self._header.clear()
            # However the text is cut, what may follow arguments is no part of the next name.
            self._raw = ["".join(self._raw).lstrip(self.FILLER)]
            self._release("section", text.lstrip(self.FILLER), marker)
        elif text.strip(self.FILLER):
            self._fail("text after the arguments", text, marker)
        elif marker in self.CLOSERS:
            self._leave()
        elif marker is not None:
            self._begin(marker)
