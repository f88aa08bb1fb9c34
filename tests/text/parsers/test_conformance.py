"""Every tool parser against the same sixty answers, complete and cut at every character.

Writers write each parser's format, and share no code with the parsers.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from lockstep.text.parsers import TOOL_PARSERS, ReplyParser, choose
from lockstep.text.parsers.events import (
    NATURAL_END,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    Reply,
    TextEnd,
)
from lockstep.text.parsers.think import ThinkParser
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.text.model_families import FAMILIES

Calls = list[tuple[str, dict[str, Any]]]


def qwen3_coder(calls: Calls) -> str:
    def value(v: Any) -> str:
        return v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)

    def call(name: str, arguments: dict[str, Any]) -> str:
        keys = [f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in arguments.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(keys)}</function>\n</tool_call>"

    return "\n".join(call(*c) for c in calls)


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(c, 'arguments')}\n</tool_call>" for c in calls)


def nemotron_json(calls: Calls) -> str:
    return f"<TOOLCALL>[{', '.join(_object(c, 'arguments') for c in calls)}]</TOOLCALL>"


def llama3_json(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(_object(c, "parameters") for c in calls)


def deepseek_v3(calls: Calls) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        block = f"```json\n{_json(arguments)}\n```"
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{block}<｜tool▁call▁end｜>"

    body = "\n".join(call(*c) for c in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"

    return f"<｜tool▁calls▁begin｜>{''.join(call(*c) for c in calls)}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    def call(position: int, name: str, arguments: dict[str, Any]) -> str:
        head = f"<|tool_call_begin|>functions.{name}:{position}<|tool_call_argument_begin|>"
        return f"{head}{_json(arguments)}<|tool_call_end|>"

    body = "".join(call(i, *c) for i, c in enumerate(calls))
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def pythonic(calls: Calls) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"

    return f"<|python_start|>[{', '.join(call(*c) for c in calls)}]<|python_end|>"


def _object(call: tuple[str, dict[str, Any]], key: str) -> str:
    return f'{{"name": "{call[0]}", "{key}": {_json(call[1])}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


WRITERS: list[Callable[[Calls], str]] = [
    qwen3_coder,
    hermes,
    nemotron_json,
    llama3_json,
    deepseek_v3,
    deepseek_v31,
    kimi_k2,
    pythonic,
]
CALLS: list[Calls] = [
    [("get", {})],
    [("get", {"city": "Rio"})],
    [("get", {"city": ""})],
    [("get", {"n": 3})],
    [("get", {"n": -2.5, "m": 1e20})],
    [("get", {"flag": True, "off": False, "none": None})],
    [("get", {"city": 'a "quoted" \\ b'})],
    [("get", {"city": "two\nlines\tand a tab"})],
    [("get", {"city": "naïve 日本語 🦊"})],
    [("get", {"city": "it's {'a': [1]} ]}), (x"})],
    [("get", {"code": "if a < b:\n    return c[1]"})],
    [("get", {"list": [1, "two", None, {"k": [True]}]})],
    [("get", {"where": {"a": {"b": {"c": [[], {}]}}}})],
    [("get", {"a": "x", "b": 2, "c": [3]})],
    [("get_weather_v2", {"city": "Rio"})],
    [("get", {"city": "Rio"}), ("set", {"n": 1})],
    [("get", {}), ("get", {}), ("get", {"n": 0})],
    [("get", {"city": "</fun <tool <｜tool <|tool_ <TOOL"})],
    [("get", {"city": "long " * 20})],
    [("get", {"city": "a,b;c:d=e"}), ("set", {"where": {"x": "}"}})],
]
FRAMES = [("", ""), ("", "Let me look < there:"), ("I think\n\nof <it>", "Then.")]
CASES = [(reasoning, content, calls) for reasoning, content in FRAMES for calls in CALLS]


CALL_HEAD = 40
"""Length of a call's first characters, which are cut after other text."""


def test_number_of_cases() -> None:
    assert len(CASES) == 60


def tools_of(calls: Calls) -> list[dict[str, Any]]:
    """Return tools with these names, and schemas with the types of these arguments."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    kinds |= {list: "array", dict: "object"}
    result = []
    for name, arguments in calls:
        properties = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        result.append({"type": "function", "function": function})
    return result[::-1]


def parser_of(name: str, calls: Calls, thinks: bool) -> ReplyParser:
    tools = TOOL_PARSERS[name]
    prompt = "<think>\n" if thinks else "</think>\n\n"
    return ReplyParser(ThinkParser(prompt, tools.ENDS_REASONING), tools(tools_of(calls)))


def answer_of(
    writer: Callable[[Calls], str], thought: str, content: str, calls: Calls
) -> tuple[str, str]:
    """Return the text before an answer's calls, and the calls."""
    lead = f"{thought}\n</think>\n\n" if thought else ""
    return lead + content + ("\n\n" if content else ""), writer(calls)


def streamed(parser: ReplyParser, chunks: list[str]) -> Reply:
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return Reply().add(events + parser.finish())


def destinations(events: list[Event]) -> Iterator[tuple[Any, str]]:
    """Yield (destination, text) of each event."""
    for event in events:
        match event:
            case Content(text):
                yield "content", text
            case Reasoning(text):
                yield "reasoning", text
            case CallArguments(index, text):
                yield index, text


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("reasoning", FRAMES, ids=["plain", "content", "reasoning"])
def test_replies_are_independent_of_cuts(
    writer: Callable[[Calls], str], reasoning: tuple[str, str]
) -> None:
    """Check each reply, also for other cuts, and that no streamed part is taken back.

    Every other cut, from the first or the second on: the next answer has the cuts that one omits.
    After other text a call is cut in its first CALL_HEAD characters; the rest is cut where the call
    is alone.
    """
    cases = (case for case in CASES if case[:2] == reasoning)
    for position, (thought, content, calls) in enumerate(cases):
        lead, called = answer_of(writer, thought, content, calls)
        text = lead + called

        def make(calls: Calls = calls, thinks: bool = bool(thought)) -> ReplyParser:
            return parser_of(writer.__name__, calls, thinks)

        complete = make().parse(text)
        assert complete.errors == [], text
        assert (complete.reasoning, complete.content) == (thought, content)
        result = [(call.name, json.loads(call.arguments)) for call in complete.tool_calls]
        assert result == calls
        last = len(lead) + CALL_HEAD if lead else len(text)
        for cut in range(position % 2, min(last, len(text)), 2):
            assert streamed(make(), [text[:cut], text[cut:]]) == complete, (text[:cut], text[cut:])
        finals = {"content": complete.content, "reasoning": complete.reasoning}
        finals |= {i: call.arguments for i, call in enumerate(complete.tool_calls)}
        parser = make()
        so_far: dict[Any, str] = dict.fromkeys(finals, "")
        for char in text:
            for position, chunk in destinations(parser.feed(char)):
                so_far[position] += chunk
                assert finals[position].startswith(so_far[position]), "a tag leaked"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with a token for every byte."""
    folder = tmp_path_factory.mktemp("bytes")
    FAMILIES["mistral"].tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.default_cases("hermes", "kimi_k2", "pythonic")
@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: w.__name__)
def test_byte_tokens_give_the_same_reply(
    writer: Callable[[Calls], str], tokenizer: Tokenizer
) -> None:
    """Partial characters emit no text."""
    tokens = [tokenizer.fast.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    for thought, content, calls in CASES:
        text = "".join(answer_of(writer, thought, content, calls))
        chunks = Detokenizer(tokenizer)
        parts = [chunks.push(tokens[byte]) for byte in text.encode()]
        assert "\ufffd" not in "".join(parts)
        parts.append(chunks.flush())
        name = writer.__name__
        complete = parser_of(name, calls, bool(thought)).parse(text)
        assert streamed(parser_of(name, calls, bool(thought)), parts) == complete, text


BROKEN = {
    "qwen3_coder": [
        "<tool_call>\nnot a function\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get",
        "<tool_call>",
    ],
    "hermes": [
        '<tool_call>\n{"name": "get", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": 5}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": {"a": 1, oops}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": {"a": "cut',
        '<tool_call>\nget(city="Rio")\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "args": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"input": {"a": 1}, "name": "get", "id": 1}\n</tool_call>',
        "<tool_call>",
    ],
    "nemotron_json": [
        '<TOOLCALL>[{"name": "get", "arguments": {"a": nul}}]</TOOLCALL>',
        "<TOOLCALL>get</TOOLCALL>",
        '<TOOLCALL>[{"name": "get"',
        '<TOOLCALL>[{"name": "get", "argument": {"a": 1}}]</TOOLCALL>',
    ],
    "llama3_json": [
        '{"city": "Rio"}',
        '{"name": "get", "parameters": {"a": 1',
        '{"name": "Ada", "born": 1815}',
        "<|python_tag|>print(1)",
    ],
    "deepseek_v3": [
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n[]\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get<｜tool▁call▁end｜>",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{"a":',
    ],
    "deepseek_v31": [
        "<｜tool▁call▁begin｜>get<｜tool▁sep｜>nothing<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>get<｜tool▁call▁end｜>",
        '<｜tool▁call▁begin｜>get<｜tool▁sep｜>{"a": "cut',
    ],
    "kimi_k2": [
        "<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>x<|tool_call_end|>",
        "<|tool_call_begin|>functions.get:0<|tool_call_end|>",
        '<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{"a": 1,}',
    ],
    "pythonic": [
        '[get(city="Rio", 5)]',
        "[get(city=open('x'))]",
        '[get(city="cut',
        "<|python_start|>words<|python_end|>",
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_calls_become_text_with_an_error(name: str) -> None:
    for text in BROKEN[name]:
        complete = parser_of(name, [], False).parse(text)
        assert complete.errors, text
        assert complete.content == text
        assert {call.name for call in complete.tool_calls} <= {"get"}
        for cut in range(len(text)):
            assert streamed(parser_of(name, [], False), [text[:cut], text[cut:]]) == complete
        assert streamed(parser_of(name, [], False), list(text)) == complete


CUT = TextEnd(cut=True)


def is_json(text: str) -> bool:
    """Return whether a client can parse these arguments."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.default_cases("hermes", "deepseek_v3", "pythonic")
@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: w.__name__)
def test_cut_call_is_never_complete(writer: Callable[[Calls], str]) -> None:
    """At every character, fed at once and by characters: neither complete nor valid JSON."""
    for calls in (calls for calls in CALLS if len(calls) == 1):
        name = writer.__name__
        parser = TOOL_PARSERS[name]
        text = writer(calls).removesuffix(parser.AROUND[1])
        if name == "pythonic":
            text = text.removesuffix("]<|python_end|>")
        for cut in range(len(text)):
            result = parser_of(name, calls, False).parse(text[:cut], CUT)
            for call in result.tool_calls:
                assert not call.complete and not is_json(call.arguments), text[:cut]
                assert call.arguments and result.errors
            assert len(result.content) <= cut
            if cut % 7 == 0:  # streaming each beginning anew takes quadratic time
                parts = parser_of(name, calls, False)
                events = [event for char in text[:cut] for event in parts.feed(char)]
                assert Reply().add(events + parts.finish(CUT)) == result


@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: w.__name__)
def test_calls_before_a_cut_remain_complete(writer: Callable[[Calls], str]) -> None:
    calls: Calls = [("get", {"city": "Rio"}), ("set", {"where": {"a": [1]}})]
    complete = parser_of(writer.__name__, calls, False).parse(writer(calls))
    assert all(call.complete for call in complete.tool_calls)
    text = writer(calls)
    for cut in range(text.index("set") + 3, len(text)):
        result = parser_of(writer.__name__, calls, False).parse(text[:cut], CUT)
        assert result.tool_calls[0] == complete.tool_calls[0]
        for call in result.tool_calls[1:]:
            assert call.complete == is_json(call.arguments)
            assert not call.complete or call == complete.tool_calls[1]


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("hermes", "</tool_call>"),
        ("hermes", "\n</tool_call>"),
        ("qwen3_coder", "</tool_call>"),
        ("qwen3_coder", "</function>\n</tool_call>"),
        ("kimi_k2", "<|tool_call_end|>"),
        ("deepseek_v31", "<｜tool▁call▁end｜>"),
        ("nemotron_json", "</TOOLCALL>"),
        ("pythonic", "]"),
    ],
)
def test_stop_string_that_closes_a_call_completes_it(name: str, stop: str) -> None:
    """The model wrote the stop string, but the text omits it."""
    writer = next(w for w in WRITERS if w.__name__ == name)
    calls: Calls = [("get", {"city": "Rio"})]
    text = writer(calls)
    before = text[: text.index(stop)]
    result = parser_of(name, calls, False).parse(before, TextEnd(cut=True, stop=stop))
    assert [(c.name, json.loads(c.arguments)) for c in result.tool_calls] == calls
    assert result.tool_calls[0].complete
    assert (result.content, result.errors) == ("", [])
    inside = text[: text.index("Rio") + 3]
    result = parser_of(name, calls, False).parse(inside, TextEnd(cut=True, stop=" \n"))
    assert not any(c.complete or is_json(c.arguments) for c in result.tool_calls)
    assert all(" \n" not in c.arguments for c in result.tool_calls)


def test_first_arguments_event_is_a_brace() -> None:
    """Clients read empty arguments as none, so a cut call may not have them."""
    calls: Calls = [("get", {"city": "x"})]
    for writer in WRITERS:
        parser = parser_of(writer.__name__, calls, False)
        events = [event for char in writer(calls) for event in parser.feed(char)]
        begun = next(i for i, event in enumerate(events) if isinstance(event, CallStart))
        assert events[begun + 1] == CallArguments(0, "{")


THOUGHTS = {
    "qwen3_coder": [
        "a <tool_call> tag",
        "<tool_call>\n<function=NAME>\n",
        "<function=x> <tool_call>",
    ],
    "hermes": [
        "<tool_call>{json}</tool_call>, but",
        '<tool_call>{"name": "none", "arguments": {}}',
    ],
    "nemotron_json": ["<TOOLCALL>[...]</TOOLCALL>", "a <TOOLCALL>"],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜> comes first",
        "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>",
    ],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no<｜tool▁sep｜>{}"],
    "kimi_k2": [
        "<|tool_calls_section_begin|> comes first",
        "<|tool_call_begin|>x<|tool_call_end|>",
    ],
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_thought_may_name_a_tag(name: str) -> None:
    calls: Calls = [("get", {"city": "Rio"})]
    written = next(w for w in WRITERS if w.__name__ == name)(calls)
    for thought in THOUGHTS[name]:
        for text, content, count in (
            (f"{thought} so.\n</think>\n\nHello!", "Hello!", 0),
            (f"{thought} so.\n</think>\n\n{written}", "", 1),
            (f"{thought} so.\n{written}", "", 1),
            (f"{thought} so.\n{written}\n</think>\n\nDone", "\nDone", 1),
        ):
            result = parser_of(name, calls, True).parse(text)
            assert result.reasoning == f"{thought} so.", text
            assert result.content == content and result.errors == []
            assert [(c.name, json.loads(c.arguments)) for c in result.tool_calls] == calls[:count]
            for cut in range(0, len(text), 3):
                assert streamed(parser_of(name, calls, True), [text[:cut], text[cut:]]) == result
            assert streamed(parser_of(name, calls, True), list(text)) == result


def test_kimi_section_tag_may_be_singular() -> None:
    calls: Calls = [("get", {"city": "Rio"}), ("get", {"city": "Rome"})]
    text = "Look." + kimi_k2(calls).replace("tool_calls_section", "tool_call_section")
    result = parser_of("kimi_k2", calls, False).parse(text)
    assert (result.content, result.errors) == ("Look.", [])
    assert [(c.name, json.loads(c.arguments)) for c in result.tool_calls] == calls
    assert result == streamed(parser_of("kimi_k2", calls, False), list(text))


def without_tags_of_calls(calls: Calls) -> str:
    """Return calls in a section of Kimi's without their own tags, as models write at times."""
    text = kimi_k2(calls)
    return text.replace("<|tool_call_begin|>", "").replace("<|tool_call_end|>", "")


def without_tags_of_calls_v31(calls: Calls) -> str:
    """Return calls in a section of DeepSeek-V3.1's without their own tags."""
    text = deepseek_v31(calls)
    return text.replace("<｜tool▁call▁begin｜>", "").replace("<｜tool▁call▁end｜>", "")


def without_opening_tags(calls: Calls) -> str:
    """Return calls in a section of Kimi's of which only the first has an opening tag."""
    begin = "<|tool_call_begin|>"
    head, _, rest = kimi_k2(calls).partition(begin)
    return head + begin + rest.replace(begin, "")


def with_extra_brace(text: str) -> str:
    """Return the text with an extra brace at the end of each call's last line of braces."""
    return re.sub(r"(\}+)(?=\s*(`|</tool_call>|\]?</TOOLCALL>|<.tool.call.end))", r"\1}", text)


def with_unclosed_parameter_tags(calls: Calls) -> str:
    """Return calls of qwen3_coder whose closing parameter tags lack their >."""
    return qwen3_coder(calls).replace("</parameter>", "</parameter")


MODEL_ERRORS: list[tuple[str, Callable[[Calls], str]]] = [
    ("kimi_k2", without_tags_of_calls),
    ("kimi_k2", without_opening_tags),
    ("deepseek_v31", without_tags_of_calls_v31),
    ("hermes", lambda calls: with_extra_brace(hermes(calls))),
    ("nemotron_json", lambda calls: with_extra_brace(nemotron_json(calls))),
    ("kimi_k2", lambda calls: with_extra_brace(kimi_k2(calls))),
    ("deepseek_v3", lambda calls: with_extra_brace(deepseek_v3(calls))),
    ("deepseek_v31", lambda calls: with_extra_brace(deepseek_v31(calls))),
    ("qwen3_coder", with_unclosed_parameter_tags),
]


@pytest.mark.parametrize(("name", "writer"), MODEL_ERRORS)
def test_common_model_errors_leave_calls_complete(
    name: str, writer: Callable[[Calls], str]
) -> None:
    """Calls are complete at the text's end and never before, however it is cut or streamed."""
    calls: Calls = [("get", {"city": "Rio", "n": 1}), ("set", {"where": {"a": [1]}})]
    text = "Look." + writer(calls)
    assert text not in ("Look." + w(calls) for w in WRITERS)
    result = parser_of(name, calls, False).parse(text)
    assert [(c.name, json.loads(c.arguments)) for c in result.tool_calls] == calls
    assert all(call.complete for call in result.tool_calls)
    assert (result.content.strip(), result.errors) == ("Look.", [])
    for cut in range(len(text)):
        assert streamed(parser_of(name, calls, False), [text[:cut], text[cut:]]) == result
        part = parser_of(name, calls, False).parse(text[:cut], CUT)
        for call, complete in zip(part.tool_calls, result.tool_calls, strict=False):
            assert call.complete == is_json(call.arguments)
            assert not call.complete or call == complete
    assert streamed(parser_of(name, calls, False), list(text)) == result


def test_section_text_without_a_call_is_content() -> None:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    separator = "<|tool_call_argument_begin|>"
    for inside in ("I call nothing.", f"I call get:0{separator}{{}}", 'functions.get:0{"n": 1}'):
        text = begin + inside + end
        result = parser_of("kimi_k2", [("get", {})], False).parse(text)
        assert (result.content, result.tool_calls) == (inside, [])
        assert streamed(parser_of("kimi_k2", [("get", {})], False), list(text)) == result
    cut = parser_of("kimi_k2", [], False).parse(f"{begin}functions.get:0", CUT)
    assert cut.content == "functions.get:0" and cut.errors and not cut.tool_calls


MALFORMED = [
    "<parameter=\nexport A=$B; env\n</parameter>",
    "<parameter=n: [1, 2]\n</parameter>",
    "<parameter=n=\n</parameter>",
    "<parameter=n\nls > out.txt\n</parameter>",
    "<parameter=>\n1\n</parameter>",
    "<parameter=n\n<parameter=m>\n1\n</parameter>",
    "<parameter=n\n<parameter=m>\n1\n</parameter",
]


@pytest.mark.parametrize("bad", MALFORMED)
def test_malformed_parameter_is_an_error_and_no_key(bad: str) -> None:
    calls: Calls = [("get", {"city": "Rio", "n": 1, "m": 1})]
    good = "<parameter=city>\nRio\n</parameter>\n"
    for body in (good + bad, bad + good):
        text = f"<tool_call>\n<function=get>\n{body}\n</function>\n</tool_call>"
        result = parser_of("qwen3_coder", calls, False).parse(text)
        (call,) = result.tool_calls
        due = {"city": "Rio", "m": 1} if "=m>" in bad else {"city": "Rio"}
        assert json.loads(call.arguments) == due
        assert result.errors == ["a parameter's tag without its name or its >"]
        for cut in range(len(text)):
            parser = parser_of("qwen3_coder", calls, False)
            assert streamed(parser, [text[:cut], text[cut:]]) == result


def test_call_without_tags_inside_is_complete_at_its_closing_tag() -> None:
    """The answer may be cut right after the tag, by max_tokens or a stop string."""
    text = "<tool_call>\n<function=get>\n<parameter=city>\nRio\n</tool_call>"
    result = parser_of("qwen3_coder", [("get", {"city": "Rio"})], False).parse(text, CUT)
    (call,) = result.tool_calls
    assert (call.arguments, call.complete, result.errors) == ('{"city": "Rio"}', True, [])


def mutated(rng: random.Random, writer: Callable[[Calls], str]) -> str:
    """Return an answer with calls in which pieces are missing, or are at a wrong place."""
    pieces = [*sorted(TOOL_PARSERS[writer.__name__].texts()), "</think>", *'x{}"\n,[]()=<> `']
    calls: Calls = [("get", {"city": rng.choice(["Rio", 'a"b', "<b>", "é\n"]), "n": 1})]
    text = "".join(
        rng.choice(["", "Look.\n"]) + writer(calls * rng.randrange(1, 3))
        for _ in range(rng.randrange(1, 3))
    )
    for _ in range(rng.randrange(4)):
        begin = rng.randrange(len(text) + 1)
        end = begin + rng.choice([0, 0, rng.randrange(1, 12), len(text)])
        text = text[:begin] + rng.choice(["", *pieces] if end > begin else pieces) + text[end:]
    return text


def assert_blocks(events: list[Event]) -> None:
    """Assert that no other event is between those of a call: some APIs stream it as one block."""
    current: int | None = None
    for event in events:
        if isinstance(event, CallStart):
            current = event.index
        elif isinstance(event, CallArguments | CallEnd):
            assert event.index == current
        elif isinstance(event, Content | Reasoning):
            current = None


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_mutated_calls_are_read_alike_however_they_are_cut(
    writer: Callable[[Calls], str], count: int
) -> None:
    rng = random.Random(f"{writer.__name__} {count}")
    for _ in range(count):
        text = mutated(rng, writer)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(len(text) // 4))
        parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        end = rng.choice([NATURAL_END, CUT])
        replies = []
        for chunks in ([text], list(text), parts):
            parser = parser_of(writer.__name__, [("get", {"city": "", "n": 1})], False)
            events = [event for chunk in chunks for event in parser.feed(chunk)]
            events += parser.finish(end)
            assert_blocks(events)
            replies.append(Reply().add(events))
        assert replies[0] == replies[1] == replies[2], text
        for call in replies[0].tool_calls:
            assert not call.complete or is_json(call.arguments)


def test_repeated_parameter_is_an_error() -> None:
    body = "<parameter=n>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    text = f"<tool_call>\n<function=get>\n{body}</function>\n</tool_call>"
    result = parser_of("qwen3_coder", [("get", {"n": 1})], False).parse(text)
    assert result.tool_calls[0].arguments == '{"n": 1}'
    assert result.errors == ["a repeated parameter"]
    result = parser_of("pythonic", [], False).parse("[get(n=1, n=2)]")
    assert result.errors == ["a repeated argument"] and not result.tool_calls[0].complete


def test_function_tag_without_bracket_is_no_call() -> None:
    text = (
        "<tool_call>\n<function=get\n<parameter=city>\nRio\n</parameter>\n</function>\n</tool_call>"
    )
    result = parser_of("qwen3_coder", [], False).parse(text)
    assert result.errors and not result.tool_calls and result.content == text


def test_malformed_text_after_a_call_keeps_the_call() -> None:
    result = parser_of("pythonic", [], False).parse('[get(city="Rio"), 5]')
    assert [json.loads(call.arguments) for call in result.tool_calls] == [{"city": "Rio"}]
    assert result.errors and result.content == ", 5]"


@pytest.mark.parametrize("name", [n for n in BROKEN if n not in ("llama3_json", "pythonic")])
def test_call_after_a_malformed_call_is_read(name: str) -> None:
    writer = next(w for w in WRITERS if w.__name__ == name)
    calls: Calls = [("get", {"city": "Rio"})]
    text = BROKEN[name][0] + writer(calls)
    result = parser_of(name, calls, False).parse(text)
    assert result.errors and result.content == BROKEN[name][0]
    last = result.tool_calls[-1]
    assert (last.name, json.loads(last.arguments)) == calls[0]


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "text", ["plain", "[1, 2]", "[] [", "a {", "say [get(x=1)]", "[", "[x", " \n[a b(", "[]"]
)
def test_answers_without_calls(name: str, text: str) -> None:
    result = parser_of(name, [], False).parse(text)
    assert (result.content, result.tool_calls) == (text, [])
    assert streamed(parser_of(name, [], False), list(text)) == result


def test_calls_without_tags() -> None:
    calls: Calls = [("get", {"city": "Rio", "n": [1, {"a": None}]}), ("set", {})]
    for writer in (llama3_json, pythonic):
        text = writer(calls)
        for tag in ("<|python_tag|>", "<|python_start|>", "<|python_end|>"):
            text = text.replace(tag, "")
        result = parser_of(writer.__name__, [], False).parse(f"\n{text}\n")
        assert [(c.name, json.loads(c.arguments)) for c in result.tool_calls] == calls
        assert (result.content, result.errors) == ("", [])


def test_arguments_are_streamed() -> None:
    calls: Calls = [("get", {"city": "x" * 200})]
    for writer in WRITERS:
        parser = parser_of(writer.__name__, calls, False)
        chunks = [e for char in writer(calls) for e in parser.feed(char)]
        count = sum(isinstance(event, CallArguments) for event in chunks)
        assert count > 200 or writer is pythonic


def test_kimi_call_ids_are_from_the_model() -> None:
    calls: Calls = [("get", {}), ("files.read:x", {})]
    result = parser_of("kimi_k2", calls, False).parse(kimi_k2(calls)).tool_calls
    assert [c.id for c in result] == ["functions.get:0", "functions.files.read:x:1"]
    assert [c.name for c in result] == ["get", "files.read:x"]
    twice = kimi_k2(calls[:1]).replace("<|tool_calls_section_end|>", "") + kimi_k2(calls[:1])
    result = parser_of("kimi_k2", calls, False).parse(twice).tool_calls
    assert [c.id for c in result] == ["functions.get:0", None], (
        "an id that came is given to no other"
    )


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "get", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"arguments": {"a": 1}, "name": "get"}', {"a": 1}),
        ('{"id": 3, "name": "get", "parameters": {"a": 1}, "x": [{}]}', {"a": 1}),
        ('{"name": "get", "arguments": null}', {}),
        ('{"name": "get"}', {}),
        ('{"id": "c", "type": "function", "name": "get"}', {}),
        ('{"name": "get", "arguments": {"a": "1\n2"}}', {"a": "1\n2"}),
    ],
)
def test_forms_of_json_calls(text: str, arguments: dict[str, Any]) -> None:
    result = parser_of("hermes", [], False).parse(f"<tool_call>{text}</tool_call>")
    assert result.errors == [] and result.content == ""
    assert [(c.name, json.loads(c.arguments)) for c in result.tool_calls] == [("get", arguments)]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ('{"name": <function-name>, "arguments": <args-json-object>}', "hermes"),
        ("'<｜tool▁sep｜>' + name + '\\n```json\\n'", "deepseek_v3"),
        ("name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
        ("id + '<|tool_call_argument_begin|>'", "kimi_k2"),
        ("<TOOLCALL>[' + calls + ']</TOOLCALL>", "nemotron_json"),
        ('"parameters": dictionary of argument name and its value', "llama3_json"),
        ("[func_name1(params_name1=params_value1, ...)]", "pythonic"),
    ],
)
def test_template_selects_the_tool_parser(template: str, name: str) -> None:
    assert choose("tool_call_parser", TOOL_PARSERS, "auto", template) is TOOL_PARSERS[name]
