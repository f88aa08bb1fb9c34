"""Calls that are a name, a separator, and JSON arguments, in tags of their own."""

from typing import Any, ClassVar

from lockstep.text.grammars.lark import Rules, Tool, sequence
from lockstep.text.parsers.call_parser import CallParser
from lockstep.text.parsers.events import CallError
from lockstep.text.parsers.json_reader import END, FAULT, JsonValue
from lockstep.text.scan import Markers


class NamedCalls(CallParser):
    """Grammar without its tags: subclasses define them and the position of the name.

    OPENERS: "call" begins a call; names that end in "_end" end a section of calls, others begin
    one. SEPARATOR: text between a name and its arguments. LEAD, TRAIL: text before and after the
    name. LAST: text after the arguments.

    In a section a call may lack its own tags: a name of one word and the separator begin it too.
    """

    SEPARATOR: ClassVar[str]
    LEAD: ClassVar[str] = ""
    TRAIL: ClassVar[str]
    LAST: ClassVar[str] = ""
    JSON_CALLS = True
    AFTER = "tail"
    FILLER = "} \t\r\n"
    """A brace too many is a slip that many models make."""

    def __init_subclass__(cls) -> None:
        around = {**cls.OPENERS, **cls.OVER}
        cls.MARKERS = {
            "content": Markers({**cls.OPENERS}),
            "broken": Markers(around),
            "header": Markers({"separator": cls.SEPARATOR, **around}),
            "section": Markers({"separator": cls.SEPARATOR, **around}),
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

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self._header: list[str] = []  # text in front of a separator
        self._in_calls = False  # a section of calls was opened and not ended

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
        name, call_id = self._named(header) if marker == "separator" else ("", None)
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
        name, call_id = self._named("".join(self._header))
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
            self._release("section", text, marker)
        elif text.strip(self.FILLER):
            self._fail("text behind arguments", text, marker)
        elif marker in self.OVER:
            self._leave()
        elif marker is not None:
            self._begin(marker)
