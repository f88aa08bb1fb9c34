"""Reasoning and tool-call parsers: what they find, and that the cut of the stream is no matter."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.text.parsers import REASONING_PARSERS, TOOL_PARSERS, ReplyParser, choose
from lockstep.text.parsers.events import Reply, ToolCall
from lockstep.text.parsers.hermes import HermesParser
from lockstep.text.parsers.qwen3_coder import Qwen3CoderParser
from lockstep.text.parsers.schema import coerce, types_of
from lockstep.text.parsers.think import ThinkParser

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "where": {"$ref": "#/$defs/place"},
    "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"place": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]


def xml(**values):
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=get>\n{body}</function>\n</tool_call>"


def reply(text, end="</think>\n\n", tools=Qwen3CoderParser):
    return ReplyParser(ThinkParser(end), tools(TOOLS)).parse(text)


def arguments(text):
    return [json.loads(call.arguments) for call in reply(text).tool_calls]


CASES = [
    "hello\n",
    "thinking\nhard\n\n</think>\n\nAnswer.\n\n" + xml(city='Paris "x"\n<b>', days="3"),
    "<think>\n\na\n</think>\n\n" + xml(flag="None", where='{"a": [1]}') + "\n" + xml(),
    "a <tool_call><function=get><parameter=city>x</function>y<parameter=days>7</tool_call> b ",
    "<function=get><function=get <tool_call><function=get></tool_call></tool_call></think>",
    "one<tool_call></tool_call>two <par",
    "<tool_call>\n<function=get>\n<parameter=city>\n\nabc\n</function>\n",
    '<tool_call>\n{"name": "get", "arguments": {"a": "<b>"}}\n</tool_call>\n'
    "<tool_call>{bad}</tool_call>",
]


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("end", ["<think>\n", "<think>\n\n</think>\n\n", "assistant\n"])
@pytest.mark.parametrize("tools", list(TOOL_PARSERS.values()))
def test_every_cut_gives_the_same_reply(text, end, tools):
    whole = reply(text, end, tools)

    def streamed(pieces):
        parser = ReplyParser(ThinkParser(end), tools(TOOLS))
        events = [event for piece in pieces for event in parser.feed(piece)]
        return Reply().add(events + parser.finish())

    assert streamed(list(text)) == whole
    for cut in range(len(text)):
        assert streamed([text[:cut], text[cut:]]) == whole
    if tools is Qwen3CoderParser:
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


@given(st.text("<>/=\n abfunctio_calprmethk", max_size=60))
def test_noise_is_cut_safe(text):
    text = "<tool_call><function=a><parameter=b>" + text
    parser = Qwen3CoderParser(TOOLS)
    events = [event for char in text for event in parser.feed(char)]
    streamed = Reply().add(events + parser.finish())
    assert streamed == reply(text)
    for call in streamed.tool_calls:
        json.loads(call.arguments)


@given(st.text(max_size=40) | st.text("<>/=\n parmet", max_size=40))
@example("if size < parameter == 1: ...")
@example("<parameter")
def test_string_values_survive(value):
    text = xml(city=value)
    if not any(tag in value for tag in ("</parameter>", "<parameter=", "</tool_call>")):
        assert arguments(text) == [{"city": value}]


def test_typed_values():
    text = xml(city="7", days="7", where='{"x": 1}', flag="TRUE", other="[1]")
    expected = {"city": "7", "days": 7, "where": {"x": 1}, "flag": True, "other": "[1]"}
    assert arguments(text) == [expected]


def test_content_and_reasoning_around_calls():
    found = reply("why\n</think>\n\nLook:\n\n" + xml(days="1") + "\n" + xml(), "<think>\n")
    assert (found.reasoning, found.content) == ("why", "Look:")
    assert found.tool_calls == [ToolCall("get", '{"days": 1}'), ToolCall("get", "{}")]
    assert reply("never ended", "<think>\n") == Reply(reasoning="never ended")
    assert reply("plain", "assistant\n") == Reply(content="plain")
    inside = reply("so\n" + xml(), "<think>\n")
    assert inside.reasoning == "so" and len(inside.tool_calls) == 1


def test_missing_closers():
    text = "<tool_call><function=get><parameter=city>a<parameter=days>2</tool_call>"
    assert arguments(text) == [{"city": "a", "days": 2}]
    assert arguments("<function=get><parameter=days>\n5\n") == [{"days": 5}]
    assert arguments(xml(city="</function> stays")) == [{"city": "</function> stays"}]


def test_long_strings_stream():
    parser = Qwen3CoderParser(TOOLS)
    parser.feed("<tool_call>\n<function=get>\n<parameter=city>\n")
    assert parser.feed("abc")[0].text == "abc"
    assert parser.feed('"\n')[0].text == '\\"'
    assert parser.feed("x")[0].text == "\\nx"


def test_hermes():
    found = reply(CASES[-1], tools=HermesParser)
    assert found.tool_calls == [ToolCall("get", '{"a": "<b>"}')]
    assert found.content == "\n<tool_call>{bad}</tool_call>"


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("null", {"null", "string"}, None),
        ("5", {"number"}, 5),
        ("5.0", {"number"}, 5),
        ("nan", {"number"}, "nan"),
        ("0", {"boolean"}, False),
        ("0", {"boolean", "integer"}, 0),
        ("[1", {"array"}, "[1"),
        ("[1]", {"array", "string"}, [1]),
        ("x", set(), "x"),
    ],
)
def test_coercion(text, types, value):
    found = coerce(text, types)
    assert found == value and type(found) is type(value)


def test_types_of_a_reference_to_itself():
    schema = {"$ref": "#"}
    assert types_of(schema, schema) == set()


def test_choice():
    assert choose("tool_parser", TOOL_PARSERS, "auto", "<function=x") is Qwen3CoderParser
    qwen3 = '"{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}"'
    assert choose("tool_parser", TOOL_PARSERS, "auto", qwen3) is HermesParser
    assert choose("tool_parser", TOOL_PARSERS, "none", "<function=x") is None
    assert choose("tool_parser", TOOL_PARSERS, "auto", None) is None
    assert choose("reasoning_parser", REASONING_PARSERS, "auto", "a</think>") is ThinkParser
    with pytest.raises(ConfigError, match="tool_parser='x'.*hermes"):
        choose("tool_parser", TOOL_PARSERS, "x", None)
