"""Reasoning and tool-call parsers: what they find, independently of the stream's cuts."""

import itertools
import json
import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.text.parsers import REASONING_PARSERS, TOOL_PARSERS, ReplyParser, choose
from lockstep.text.parsers.deepseek_v3 import DeepSeekV3Parser
from lockstep.text.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Reasoning,
    Reply,
    TextEnd,
    ToolCall,
)
from lockstep.text.parsers.hermes import HermesParser
from lockstep.text.parsers.kimi_k2 import KimiK2Parser
from lockstep.text.parsers.llama3 import Llama3Parser
from lockstep.text.parsers.pythonic import PythonicParser
from lockstep.text.parsers.qwen3_coder import Qwen3CoderParser
from lockstep.text.parsers.schema import coerce, property_types, to_json, types_of
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
    return parser_of(end, tools).parse(text)


def parser_of(end, tools):
    return ReplyParser(ThinkParser(end, tools.ENDS_REASONING), tools(TOOLS))


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
    "<tool_call><function=get>x<parameter=city>a</parameter>y</function>\n<function=get>z",
    "<function=get>x<parameter=city>a</parameter>y</function> b <function=get><parameter=a b",
    "<tool_call><function=get>x</tool_call>\ny",
    "<｜tool▁calls▁begin｜>get<｜tool▁sep｜>get\n```json\n{}\n`<｜tool▁sep｜>get\n```json\n{}\n```",
    '<tool_call>\n{"name": "get", "arguments": {"a": "<b>"}}\n</tool_call>\n'
    "<tool_call>{bad}</tool_call>",
]


def assert_calls_are_whole(events):
    """Assert that no other event is between those of a call: APIs stream a call as one block."""
    current = None
    for event in events:
        match event:
            case CallStart(index):
                current = index
            case CallArguments(index) | CallEnd(index):
                assert index == current, events
            case Content() | Reasoning():
                current = None


def check_cuts(text, end, tools, cuts):
    """Assert that single characters, and each of these cuts, give the reply of the complete
    text."""
    complete = reply(text, end, tools)

    def streamed(parts):
        parser = parser_of(end, tools)
        events = [event for part in parts for event in parser.feed(part)] + parser.finish()
        assert_calls_are_whole(events)
        return Reply().add(events)

    assert streamed(list(text)) == complete
    for cut in cuts:
        assert streamed([text[:cut], text[cut:]]) == complete
    if tools is Qwen3CoderParser:
        for call in complete.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


PROMPT_ENDS = ["<think>\n", "<think>\n\n</think>\n\n", "assistant\n"]
CUTS_PER_CASE = 6
"""Cuts per text of the default run, besides single characters."""


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("end", PROMPT_ENDS)
@pytest.mark.parametrize("tools", list(TOOL_PARSERS.values()))
def test_cuts_give_the_same_reply(text, end, tools):
    sample = random.Random(f"{text}{end}{tools.__name__}")
    cuts = sample.sample(range(len(text)), min(CUTS_PER_CASE, len(text)))
    check_cuts(text, end, tools, cuts)


@pytest.mark.slow
@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("end", PROMPT_ENDS)
@pytest.mark.parametrize("tools", list(TOOL_PARSERS.values()))
def test_every_cut_gives_the_same_reply(text, end, tools):
    check_cuts(text, end, tools, range(len(text)))


PARTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "get", ">"),
    *("</function>", "<parameter=", "< parameter =", "<parameter\n=", "city", "days", "where"),
    *("</parameter>", "\n", " ", "\n\n", "x", "3", '{"a": 1}', "<", "</", "</fun", "null", '"'),
    *('{"name": "get", "arguments": {"a": "b"}}', '{"name": "get"}', '{"name": 5}', "\ud800", "é"),
    *('{"name": "get", "arguments": "x"}', '{"name": "get", "arguments": [NaN]}', "\u2028"),
    *('{"name": "get", "arguments": {', "[", "]", "(", ")", "=", ",", ";", "}", "\\", "get(", "'"),
    *sorted({text for parser in TOOL_PARSERS.values() for text in parser.texts()}),
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=25).map("".join) | st.text()


@settings(max_examples=50)
@given(
    TEXTS,
    st.lists(st.integers(1, 9), max_size=30),
    st.sampled_from(["<think>\n", "</think>", "assistant\n"]),
    st.sampled_from(list(TOOL_PARSERS.values())),
)
@example('<tool_call>{"name": "get", "arguments": ""}</tool_call>', [], "</think>", HermesParser)
@example('<tool_call>{"name": "", "arguments": {}}</tool_call>', [], "</think>", HermesParser)
@example("<tool_call>" + "[" * 100_000, [], "</think>", HermesParser)
@example('<tool_call>{"name": "\\ud800"}</tool_call>', [], "</think>", HermesParser)
@example(xml(where="[" * 100_000), [], "</think>", Qwen3CoderParser)
@example(xml(where='{"a": "\\ud800"}'), [], "</think>", Qwen3CoderParser)
def test_random_cuts_give_one_reply_without_empty_events(text, cuts, end, tools):
    complete = reply(text, end, tools)
    parser = parser_of(end, tools)
    indices = [*itertools.accumulate(cuts, initial=0), *range(sum(cuts) + 1, min(len(text), 1000))]
    parts = [text[i:j] for i, j in itertools.pairwise([*indices, len(text)])]
    events = [event for part in parts for event in parser.feed(part)]
    events += parser.finish()
    assert Reply().add(events) == complete
    for event in events:
        assert not isinstance(event, Content | Reasoning | CallArguments) or event.text
    for call in complete.tool_calls:
        assert call.name.strip()
        assert call.complete == is_object(call.arguments)
        assert complete.errors or call.complete


def is_object(text):
    """Return whether these are the arguments of a complete call."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@given(
    TEXTS, st.sampled_from(["<think>\n", "</think>"]), st.sampled_from(list(TOOL_PARSERS.values()))
)
def test_cut_text_has_no_falsely_complete_call(text, end, tools):
    """Complete calls of a cut text are calls of the text at its natural end, too."""
    cut = parser_of(end, tools).parse(text, TextEnd(cut=True))
    complete = reply(text, end, tools)
    for call, same in zip(cut.tool_calls, complete.tool_calls, strict=True):
        assert call.complete == is_object(call.arguments)
        assert not call.complete or call == same
    assert all(call.complete for call in cut.tool_calls) or cut.errors


# What opens each state that a parser can be in.
OPENINGS = [
    (Qwen3CoderParser, ""),
    (Qwen3CoderParser, "<tool_call>"),
    (Qwen3CoderParser, "<tool_call><function="),
    (Qwen3CoderParser, "<function=get>"),
    (Qwen3CoderParser, "<function=get><parameter="),
    (Qwen3CoderParser, "<function=get><parameter=city>"),
    (Qwen3CoderParser, "<function=get><parameter=where>"),
    (Qwen3CoderParser, "<function=get><parameter=where>a</function>"),
    (HermesParser, "a"),
    (HermesParser, "<tool_call>"),
    (HermesParser, "<think>why"),
    (HermesParser, "<think>why</think>"),
    (HermesParser, '<tool_call>{"'),
    (HermesParser, '<tool_call>{"name": "'),
    (HermesParser, '<tool_call>{"x": ['),
    (HermesParser, '<tool_call>{"arguments": {"a": "'),
    (HermesParser, '<tool_call>{"name": "get", "arguments": {"a": "'),
    (HermesParser, '<tool_call>{"name": "get", "arguments": {"a": 1} }'),
    (DeepSeekV3Parser, "<｜tool▁call▁begin｜>"),
    (KimiK2Parser, "<|tool_call_begin|>x<|tool_call_argument_begin|>"),
    (KimiK2Parser, '<|tool_call_begin|>x<|tool_call_argument_begin|>{"a": "'),
    (Llama3Parser, ""),
    (PythonicParser, "["),
    (PythonicParser, "[get("),
    (PythonicParser, "[get(a="),
    (PythonicParser, "[get(a='"),
    (PythonicParser, "[get(a=["),
]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("part", ["name and ", " \n ", "<<", "</function> ", "a"])
@pytest.mark.parametrize("case", OPENINGS, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_parser_time_is_linear_in_every_state(case, part):
    """5,000 parts; a parser that rescans the text for each needs many seconds."""
    tools, opening = case
    parser = parser_of("assistant\n", tools)
    began = time.process_time()
    events = parser.feed(opening)
    for _ in range(5_000):
        events += parser.feed(part)
    events += parser.finish()
    took = time.process_time() - began
    assert took < 1, f"{took:.1f} s for pieces of {part!r}"


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    "part", ["<<", "a<tool_call></tool_call>", xml(city="x"), "<tool_call><function=>"]
)
@pytest.mark.parametrize("tools", list(TOOL_PARSERS.values()))
def test_parser_time_is_linear_for_one_long_text(tools, part):
    began = time.process_time()
    reply(part * 2_500, "assistant\n", tools)
    assert time.process_time() - began < 1


@given(st.text(max_size=40) | st.text("<>/=\n parmet", max_size=40))
@example("if size < parameter == 1: ...")
@example("<parameter")
def test_string_values_are_kept(value):
    text = xml(city=value)
    if not any(tag in value for tag in ("</parameter>", "<parameter=", "</tool_call>")):
        assert arguments(text) == [{"city": value}]


def test_typed_values():
    text = xml(city="7", days="7", where='{"x": 1}', flag="TRUE", other="[1]")
    expected = {"city": "7", "days": 7, "where": {"x": 1}, "flag": True, "other": "[1]"}
    assert arguments(text) == [expected]


def test_content_and_reasoning_around_calls():
    result = reply("why\n</think>\n\nLook:\n\n" + xml(days="1") + "\n" + xml(), "<think>\n")
    assert (result.reasoning, result.content) == ("why", "Look:")
    assert result.tool_calls == [ToolCall("get", '{"days": 1}'), ToolCall("get", "{}")]
    assert reply("never ended", "<think>\n") == Reply(reasoning="never ended")
    assert reply("plain", "assistant\n") == Reply(content="plain")
    inside = reply("so\n" + xml(), "<think>\n")
    assert inside.reasoning == "so" and len(inside.tool_calls) == 1


def test_missing_closing_tags():
    text = "<tool_call><function=get><parameter=city>a<parameter=days>2</tool_call>"
    assert arguments(text) == [{"city": "a", "days": 2}]
    assert arguments("<function=get><parameter=days>\n5\n") == [{"days": 5}]
    assert arguments(xml(city="</function> stays")) == [{"city": "</function> stays"}]


def test_long_strings_are_streamed():
    parser = Qwen3CoderParser(TOOLS)
    parser.feed("<tool_call>\n<function=get>\n<parameter=city>\n")
    assert parser.feed("abc")[0].text == "abc"
    assert parser.feed('"\n')[0].text == '\\"'
    assert parser.feed("x")[0].text == "\\nx"


def test_hermes():
    result = reply(CASES[-1], tools=HermesParser)
    assert result.tool_calls == [ToolCall("get", '{"a": "<b>"}')]
    assert result.content == "\n<tool_call>{bad}</tool_call>"


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
    result = coerce(text, types)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    "text",
    ["9" * 5000, "1e999", "-1e999", "nan", "Infinity", "1_000", "١٢", "1e308", "[NaN]", "[1e999]"]
    + ['{"a": -Infinity}', "[" * 50_000 + "]" * 50_000, '"\\ud800"', '["\\ud800"]', "\ud800", ""]
    + ["[" + "9" * 5000 + "]", "0" * 5000 + "1", "TRUE", " null "],
)
def test_coerced_values_are_json(text):
    kinds = ["null", "integer", "number", "boolean", "object", "array", "string", "odd"]
    for types in [set(), set(kinds), *({kind} for kind in kinds)]:
        written = to_json(coerce(text, types))
        written.encode()
        json.loads(written, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#"}, {"object"}),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/days"}]}, {"object", "integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}]}]}, {"string", "array"}),
        ({"allOf": [{"$ref": "#/$defs/place"}]}, {"object"}),
        ({"enum": ["a", None, True, 2.5]}, {"string", "null", "boolean", "number"}),
        ({"const": {}}, {"object"}),
        ({"type": {}}, set()),
        ({"type": [{}, ["string"], 5, "string"]}, {"string"}),
        ({"anyOf": 3, "oneOf": {"type": "string"}, "allOf": None, "enum": "a"}, set()),
        ({"anyOf": [3, [], "x", None, {"type": "string"}]}, {"string"}),
        ({"$ref": ["#/$defs/place"]}, set()),
        ({"$ref": "#/$defs/none/such"}, set()),
        ({"$ref": "#/type/a"}, set()),
        ({"anyOf": [{"type": "string"} for _ in range(1000)]}, set()),
        ([], set()),
    ],
)
def test_types_of_a_schema(schema, types):
    assert types_of(schema, SCHEMA) == types


def test_shared_references_are_visited_once():
    refs = [[{"$ref": f"#/$defs/d{i + 1}"} for _ in range(8)] for i in range(20)]
    defs = {f"d{i}": {"anyOf": options} for i, options in enumerate(refs)}
    defs["d20"] = {"type": "integer"}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs}
    began = time.process_time()
    assert property_types(schema, "a") == {"integer"}
    assert time.process_time() - began < 1


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "anyOf", "enum", "const", "$ref", "properties", "days"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(odd, st.sampled_from(list(TOOL_PARSERS.values())))
@example(5, Qwen3CoderParser)
@example({"properties": []}, Qwen3CoderParser)
@example({"properties": {"days": {"anyOf": 3}}}, Qwen3CoderParser)
def test_invalid_schema_counts_as_empty(schema, tools):
    calls = (
        xml(city="x", days="7") + '<tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>'
    )
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    for given_tools in ([tool], [{"function": schema}], [schema], schema):
        events = ReplyParser(None, tools(given_tools)).parse(calls)
        for call in events.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


def test_choice():
    assert choose("tool_call_parser", TOOL_PARSERS, "auto", "<function=x") is Qwen3CoderParser
    qwen3 = '"{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}"'
    assert choose("tool_call_parser", TOOL_PARSERS, "auto", qwen3) is HermesParser
    assert choose("tool_call_parser", TOOL_PARSERS, "none", "<function=x") is None
    assert choose("tool_call_parser", TOOL_PARSERS, "auto", None) is None
    assert choose("reasoning_parser", REASONING_PARSERS, "auto", "a</think>") is ThinkParser
    with pytest.raises(ConfigError, match="tool_call_parser='x'.*hermes"):
        choose("tool_call_parser", TOOL_PARSERS, "x", None)
