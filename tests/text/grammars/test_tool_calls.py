"""Grammars of tool calls: parsers read every allowed answer as calls that its tools allow.

Walks draw random tokens from a grammar's masks, and sometimes insert a snippet with a meaning for
the parser, byte by byte, as far as it is allowed.
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema.validators import validator_for

from lockstep.errors import RequestError
from lockstep.sampling_params import SamplingParams, StructuredOutputsParams
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.json_schema import MAX_DEPTH
from lockstep.text.grammars.lark import Json
from lockstep.text.grammars.structured_output import (
    MAX_RULES,
    compile_structured_output,
    json_expression,
)
from lockstep.text.grammars.tool_calls import CallParams, ToolChoice, ToolSyntax
from lockstep.text.parsers import TOOL_PARSERS, ReplyParser
from lockstep.text.parsers.call_parser import CallsOrForm
from lockstep.text.parsers.events import Reply
from lockstep.text.processor import Processor
from lockstep.text.settings import TextSettings
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import masks_of
from tests.text.grammars.test_structured_output import matches, nested
from tests.text.parsers.test_conformance import WRITERS

MODEL = Path(__file__).parents[3] / "lockstep" / "assets" / "model"
NAMES = (
    "qwen3_coder", "hermes", "deepseek_v3", "deepseek_v31", "kimi_k2", "nemotron_json",
    "llama3_json", "pythonic",
)  # fmt: skip
PLACE = {"type": "object", "properties": {"x": {"type": "number"}, "note": {"type": "string"}}}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mixed": {"type": ["string", "integer", "boolean", "array", "number"]},
        "stops": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "lines": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "flag": {"type": "boolean"},
        "share": {"type": "number"},
        "kind": {"anyOf": [{"const": "none"}, {"$ref": "#/$defs/place"}]},
        "any": {},
    },
    "required": ["city", "days"],
    "$defs": {"place": PLACE},
}
SENT: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping"}},
    {
        "type": "function",
        "function": {
            "name": "wea",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]


def validators(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a validator of each tool's arguments."""
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters", {}) for function in functions}
    return {name: validator_for(schema)(schema) for name, schema in schemas.items()}


SENT_VALIDATORS = validators(SENT)
SNIPPETS = [
    '"', '"}', "}", "]", ")", "'", "\\", "\\u00e9", '\\"', ", ", ": ", "\n", "{", "[", "[1, 2]",
    "null", "12", "true", "```", "\n```", "</", "é", '["</parameter>", "', "wea", "weather",
    "ping(", "; ", "\n</parameter>\n", "</function>\n</tool_call>", "city", "days",
    "<parameter=city>\n",
    *sorted({text for name in NAMES for text in TOOL_PARSERS[name].texts()}),
]  # fmt: skip
ENDING_SNIPPETS = [*SNIPPETS[:6], "\n</parameter>\n", "</function>\n</tool_call>"]
"""Snippets that bring a walk to its end."""
MAX_TOKENS = 400


@dataclass(frozen=True)
class Model:
    """A vocabulary with its compiler."""

    tokenizer: Tokenizer
    compiler: Compiler
    tokens: dict[str, int]
    bytes: dict[bytes, int]

    def syntax(self, name: str) -> ToolSyntax:
        """Return the call syntax of a parser."""
        parser = TOOL_PARSERS[name]
        tags = parser.texts()
        return ToolSyntax(parser, {tag: i for tag, i in self.tokens.items() if tag in tags})

    def text(self, tokens: list[int]) -> str:
        """Return the text that a client with tools reads."""
        text = Detokenizer(self.tokenizer, shown=self.tokens.values())
        return "".join(map(text.push, tokens)) + text.flush()


def model_of(folder: Path, special: list[str]) -> Model:
    tokenizer = Tokenizer(folder)
    result = {tag: tokenizer.fast.token_to_id(tag) for tag in special}
    assert all(i in tokenizer.special_ids for i in result.values())
    spelled = {tokenizer.token_bytes(i): i for i in range(len(tokenizer))}
    single = {text: i for text, i in spelled.items() if len(text) == 1}
    return Model(tokenizer, Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids), result, single)


@pytest.fixture(scope="module")
def plain() -> Model:
    """Return the bundled model's vocabulary."""
    return model_of(MODEL, [])


@pytest.fixture(scope="module", params=["tags are text", "tags are special tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "tags are text":
        return model_of(MODEL, [])
    folder = tmp_path_factory.mktemp("special") / "model"
    shutil.copytree(MODEL, folder, ignore=lambda _, names: [n for n in names if "safe" in n])
    tags = sorted({tag for name in NAMES for tag in TOOL_PARSERS[name].texts()})
    tags = [tag for tag in tags if tag[0] == "<" and "=" not in tag and "para" not in tag]
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    known = Tokenizer(MODEL).fast.token_to_id
    new = [tag for tag in tags if known(tag) is None]
    config["added_tokens_decoder"] = {
        str(5000 + at): {"content": tag, "special": True} for at, tag in enumerate(new)
    }
    path.write_text(json.dumps(config))
    return model_of(folder, new)


class Walk:
    """A random walk through a grammar."""

    def __init__(self, model: Model, source: str, seed: int) -> None:
        self.model = model
        self.matcher = model.compiler.matcher(source)
        self.draw = random.Random(seed)
        self.tokens: list[int] = []

    def allowed(self) -> np.ndarray:
        """Return whether each token is allowed."""
        mask = np.frombuffer(masks_of(self.matcher)[0], dtype=np.uint8)
        return np.unpackbits(mask, bitorder="little").astype(bool)

    def take(self, token: int) -> None:
        self.tokens.append(token)
        self.matcher.accept([token])

    def snippet(self, text: str) -> None:
        """Append a text as far as it is allowed; a tag as its token where it is one."""
        line = [self.model.tokens[text]] if text in self.model.tokens else None
        for token in line or [self.model.bytes[bytes([byte])] for byte in text.encode()]:
            if not self.allowed()[token]:
                return
            self.take(token)

    def run(self) -> str | None:
        """Walk to an end; return the text, or None after MOST_TOKENS."""
        ends = sorted(self.model.compiler.ends)
        while len(self.tokens) < MAX_TOKENS:
            may = self.allowed()
            assert self.matcher.fault is None
            late = len(self.tokens) > 60
            if may[ends[0]] and (late or self.draw.random() < 0.2):
                break
            may[ends] = False
            ids = np.flatnonzero(may)
            if not len(ids):
                break
            if len(ids) > 1 and self.draw.random() < (0.9 if late else 0.6):
                self.snippet(self.draw.choice(ENDING_SNIPPETS if late else SNIPPETS))
            else:
                self.take(int(self.draw.choice(ids)))
        else:
            return None
        return self.model.text(self.tokens)


def check_calls(text: str, reply: Reply, judges: dict[str, Any]) -> None:
    """Assert that the tools allow the calls, and that none is malformed."""
    assert reply.errors == [], text
    for call in reply.tool_calls:
        judges[call.name].validate(json.loads(call.arguments))


def read(name: str, text: str) -> Reply:
    """Parse a text at once and in random parts; return the reply."""
    parser = TOOL_PARSERS[name]
    complete = ReplyParser(None, parser(SENT)).parse(text)
    for cut in range(0, len(text), max(1, len(text) // 12)):
        expected = ReplyParser(None, parser(SENT))
        events = expected.feed(text[:cut]) + expected.feed(text[cut:]) + expected.finish()
        assert Reply().add(events) == complete
    expected = ReplyParser(None, parser(SENT))
    assert (
        Reply().add([e for char in text for e in expected.feed(char)] + expected.finish())
        == complete
    )
    return complete


def walks(model: Model, source: str, seeds: range) -> Iterator[str]:
    """Yield the texts of walks that end; assert that some do."""
    result = [
        text for text in (Walk(model, source, seed).run() for seed in seeds) if text is not None
    ]
    assert result
    yield from result


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_walks_are_calls_only(model: Model, name: str, multiple: bool) -> None:
    syntax = model.syntax(name)
    source = syntax.calls_only(syntax.tools(SENT), multiple)
    for text in walks(model, source, range(4)):
        reply = read(name, text)
        check_calls(text, reply, SENT_VALIDATORS)
        assert reply.content.strip() == "", text
        assert len(reply.tool_calls) >= 1
        assert multiple or len(reply.tool_calls) == 1


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("name", NAMES)
def test_calls_in_free_text_are_valid(model: Model, name: str) -> None:
    """Walks start with the start of a call, so that some contain one."""
    syntax = model.syntax(name)
    parser = syntax.parser
    source = syntax.text_and_calls(syntax.tools(SENT), True)
    opener = parser.AROUND[0] or parser.TAGS[0] or parser.BARE
    called = 0
    for seed in range(6):
        walk = Walk(model, source, seed)
        if not parser.BARE:
            walk.snippet("I say: ")
        for part in syntax_parts(syntax, opener) if seed % 3 else ():
            walk.snippet(part)
        text = walk.run()
        if text is not None:
            reply = read(name, text)
            check_calls(text, reply, SENT_VALIDATORS)
            called += len(reply.tool_calls)
    assert called


def syntax_parts(syntax: ToolSyntax, text: str) -> list[str]:
    """Return a text split at its tags that are tokens."""
    for tag in syntax.tokens:
        text = text.replace(tag, f"\x00{tag}\x00")
    return [part for part in text.split("\x00") if part]


PING = {"type": "function", "function": {"name": "ping"}}


def allowed_tools(mode: Any, *tools: Any) -> dict[str, Any]:
    """Return a tool_choice of this type."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


WRITERS_BY_NAME = {writer.__name__: writer for writer in WRITERS}


def untagged(text: str) -> str:
    """Return calls without the tags that Llama may write around them, and grammars omit."""
    for tag in ("<|python_tag|>", "<|python_start|>", "<|python_end|>"):
        text = text.replace(tag, "")
    return text


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("name", NAMES)
def test_grammar_allows_calls_of_every_writer(model: Model, name: str) -> None:
    """The writers of test_conformance share no code with grammars."""
    writer = WRITERS_BY_NAME[name]
    syntax = model.syntax(name)
    tools = syntax.tools(SENT)
    one: list[Any] = [("weather", {"city": "Rio", "days": 3})]
    two = [*one, ("ping", {})]
    wrong: list[Any] = [("weather", {"city": "Rio", "days": 10})]
    lacks: list[Any] = [("weather", {"days": 3})]
    unknown: list[Any] = [("pong", {})]
    alone = syntax.calls_only(tools, False)
    multiple = syntax.calls_only(tools, True)
    free = syntax.text_and_calls(tools, True)
    single = syntax.text_and_calls(tools, False)

    def says(source: str, text: str) -> bool:
        return matches(model.compiler, source, untagged(text))

    assert says(alone, writer(one))
    assert says(multiple, f"\n\n{writer(two)}")
    assert says(free, writer(two))
    assert says(single, writer(one))
    assert says(free, "no call at all")
    assert not says(alone, writer(two))
    assert not says(single, writer(two))
    assert not says(multiple, f"I say: {writer(one)}")
    for calls in (wrong, lacks, unknown):
        assert not says(multiple, writer(calls))
        assert not says(free, writer(calls))
    named = syntax.calls_only(syntax.tools(SENT, ToolChoice.read(PING)), True)
    assert says(named, writer([("ping", {})]))
    assert not says(named, writer(one))
    allowed = ToolChoice.read(allowed_tools("auto", PING))
    some = syntax.text_and_calls(syntax.tools(SENT, allowed, enforced=False), True)
    assert says(some, "no call at all")
    assert says(some, writer([("ping", {})]))
    assert not says(some, writer(one))


TAGGED = [name for name in NAMES if not TOOL_PARSERS[name].BARE]
FORMAT = StructuredOutputsParams(
    json={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
)


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", TAGGED)
def test_calls_or_response_format(model: Model, name: str, strict: bool) -> None:
    """Strict tools enforce their schemas, others allow any arguments."""
    writer = WRITERS_BY_NAME[name]
    syntax = model.syntax(name)
    form = json_expression(FORMAT)
    assert form is not None
    source = syntax.calls_or_form(syntax.tools(SENT, enforced=strict), True, form)
    one: list[Any] = [("weather", {"city": "Rio", "days": 3})]
    wrong: list[Any] = [("weather", {"city": "Rio", "days": 10})]
    unknown: list[Any] = [("pong", {})]

    def says(text: str) -> bool:
        return matches(model.compiler, source, untagged(text))

    assert says(writer(one))
    assert says(f"\n\n{writer([*one, ('ping', {})])}")
    assert says('{"a": "b"}')
    assert says('{ "a" : "b" }')
    assert says(writer(wrong)) is not strict
    assert not says(writer(unknown))
    assert not says('{"b": "b"}')
    assert not says("no call at all")
    assert not says(f'{{"a": "b"}}{writer(one)}')


@pytest.mark.parametrize("name", TAGGED)
def test_content_that_spells_a_call_is_content(name: str) -> None:
    """However the stream is cut; calls remain calls."""
    parser = TOOL_PARSERS[name]
    call = untagged(WRITERS_BY_NAME[name]([("weather", {"city": "Rio", "days": 3})]))
    for text in (f'\n\n{{"a": "{call}"}}', '{"a": "<"}', " "):
        for cut in range(len(text)):
            expected = ReplyParser(None, CallsOrForm(parser(SENT)))
            events = expected.feed(text[:cut]) + expected.feed(text[cut:]) + expected.finish()
            result = Reply().add(events)
            assert result.content == text
            assert result.tool_calls == []
    for cut in range(len(call)):
        expected = ReplyParser(None, CallsOrForm(parser(SENT)))
        events = expected.feed(f"\n\n{call[:cut]}") + expected.feed(call[cut:]) + expected.finish()
        result = Reply().add(events)
        assert [one.name for one in result.tool_calls] == ["weather"]
        assert result.content == ""


@pytest.mark.default_cases("qwen3_coder", "kimi_k2", "pythonic")
@pytest.mark.parametrize("name", NAMES)
def test_calls_after_reasoning(name: str) -> None:
    """Use the server's parts: the format, the request's grammar, the parser of the answer."""
    settings = TextSettings(tool_call_parser=name, reasoning_parser="think")
    tokenizer = Tokenizer(MODEL)
    processor = Processor.for_model(tokenizer, MODEL, 2048, settings)
    messages = [{"role": "user", "content": "How is Rio?"}]
    prompt = processor.conversation(messages, SENT, enable_thinking=True)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        params = SamplingParams(structured_outputs=processor.form(None, SENT, choice))
        (request,) = processor.requests("r", prompt, params)
        grammar = request.grammar
        assert grammar is not None
        written = WRITERS_BY_NAME[name]([("weather", {"city": "Rio", "days": 3})])
        text = f"I see <tool_call> [ {{\n</think>\n\n{untagged(written)}"
        for token in processor.encode(text, add_special_tokens=False):
            mask = masks_of(grammar)[0]
            assert mask[token // 8] >> token % 8 & 1, text
            grammar.accept([token])
        reply = processor.reply_parser(prompt.text, SENT, params.structured_outputs).parse(text)
        check_calls(text, reply, SENT_VALIDATORS)
        assert reply.reasoning == "I see <tool_call> [ {"
        assert [call.name for call in reply.tool_calls] == ["weather"]


def one_tool(properties: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": properties, **more}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


CODER = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
STRINGS = {"type": "array", "items": {"type": "string"}}
VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "two\nlines", "two\nlines"),
    ({"type": "string"}, "a </parameter> b", None),
    ({"type": "string"}, "a <parameter=b> c", None),
    ({"type": "string"}, "a </tool_call> c", None),
    ({"type": "string"}, "12", "12"),
    ({}, "12", "12"),
    ({"type": "integer", "maximum": 9}, "9", 9),
    ({"type": "integer", "maximum": 9}, "10", None),
    ({"type": "integer"}, "nine", None),
    ({"enum": ["C", "F", 3, None, True]}, "C", "C"),
    ({"enum": ["C", "F", 3, None, True]}, "3", 3),
    ({"enum": ["C", "F", 3, None, True]}, "null", None),
    ({"enum": ["C"]}, "D", None),
    (STRINGS, '["</parameter>", "<parameter=a>"]', ["</parameter>", "<parameter=a>"]),
    (STRINGS, '["</function></tool_call>"]', ["</function></tool_call>"]),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "nothing", "nothing"),
    ({"type": ["string", "integer"]}, "12", 12),
    ({"type": ["string", "integer"]}, "12 days", "12 days"),
    ({"type": ["string", "integer"]}, "1_2", None),
    ({"type": ["string", "integer"]}, " 12", None),
    ({"type": ["string", "boolean"]}, "TRUE", None),
    ({"anyOf": [{"type": "string"}, STRINGS]}, '["a"]', ["a"]),
    ({"anyOf": [{"type": "string"}, STRINGS]}, "[1]", None),
    ({"anyOf": [{"type": "string"}, STRINGS]}, "a [1]", "a [1]"),
    ({"allOf": [{"$ref": "#/$defs/d"}]}, "x", "x"),
    ({"anyOf": [{}, {"type": "number"}]}, "x </parameter>", None),
    ({"anyOf": [{}, {"type": "number"}]}, '"x"', '"x"'),
    ({"anyOf": [{}, {"type": "number"}]}, "12", 12),
    ({"anyOf": [{}, {"type": "number"}]}, "1e999", int(sys.float_info.max)),
]


@pytest.mark.parametrize(("schema", "written", "value"), VALUES)
def test_values_without_quotes(plain: Model, schema: Any, written: str, value: Any) -> None:
    """Values of grammars whose texts have no quotes. None: the grammar forbids the text, except for
    null."""
    sent = one_tool({"a": schema}, required=["a"], **{"$defs": {"d": {"type": "string"}}})
    syntax = plain.syntax("qwen3_coder")
    text = CODER.format(written)
    fits = matches(plain.compiler, syntax.calls_only(syntax.tools(sent), False), text)
    assert fits == (value is not None or written == "null")
    if fits:
        (call,) = ReplyParser(None, syntax.parser(sent)).parse(text).tool_calls
        assert json.loads(call.arguments) == {"a": value}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_coder", {"a": {"type": "string", "pattern": "x"}}, "'pattern' at properties.a"),
    ("qwen3_coder", {"a": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}},
     "'maxLength' at properties.a"),
    ("qwen3_coder", {"a": {"type": ["string", "integer"], "minimum": 3}}, "'minimum'"),
    ("qwen3_coder", {"a": {"enum": ["1", 2]}}, "'enum' at properties.a .*read as another"),
    ("qwen3_coder", {"a": {"enum": ["</parameter>"]}}, "read as another"),
    ("qwen3_coder", {"a>": {"type": "string"}}, "'a>' at properties"),
    ("qwen3_coder", {" a": {"type": "string"}}, "' a' at properties"),
    ("qwen3_coder", {"a": False}, "no value matches"),
    ("qwen3_coder", {"a": {"type": "string", "anyOf": [{"minLength": 1}]}}, "'type'"),
    ("qwen3_coder", {"a": {"allOf": [{"type": "string"}, {"minLength": 1}]}}, "'allOf'"),
    ("hermes", {"a": {"$ref": "#/properties/a"}}, r"'\$ref' at properties.a .*back to itself"),
    ("qwen3_coder", {"a": {"$ref": "#/properties/b"}}, "leads to no schema"),
    ("pythonic", {"a-b": {"type": "string"}}, "'a-b' at properties"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "properties", "says"), REFUSED)
def test_schemas_that_a_syntax_cannot_express_are_refused(
    name: str, properties: dict[str, Any], says: str
) -> None:
    syntax = ToolSyntax(TOOL_PARSERS[name], {})
    sent = one_tool(properties)
    sent[0]["function"]["strict"] = True
    with pytest.raises(RequestError, match=says) as caught:
        syntax.calls_only(syntax.tools(sent), True)
    assert caught.value.field == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string", "pattern": "x", "minLength": 3}, "no", "no"),
        ({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, "today", "today"),
        ({"type": ["string", "integer"], "minimum": 3}, "2", 2),
        ({"enum": ["a", "b"], "minLength": 9}, "a", "a"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", [1, 1]),
        ({"not": {"type": "string"}, "type": "integer"}, "2", 2),
    ],
)
def test_unenforceable_bounds_are_ignored_unless_strict(
    plain: Model, schema: Any, written: str, value: Any
) -> None:
    sent = one_tool({"a": schema}, required=["a"])
    syntax = plain.syntax("qwen3_coder")
    source = syntax.calls_only(syntax.tools(sent), False)
    text = CODER.format(written)
    assert matches(plain.compiler, source, text)
    (call,) = ReplyParser(None, syntax.parser(sent)).parse(text).tool_calls
    assert json.loads(call.arguments) == {"a": value}
    assert not matches(plain.compiler, source, CODER.format("").replace("parameter=a", "b"))


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"minProperties": 1}, "'minProperties' at the root"),
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf' at the root"),
        ({"required": ["b"], "additionalProperties": False}, "'b' is no property"),
    ],
)
def test_keywords_over_all_parameters_are_refused(name: str, more: Json, says: str) -> None:
    syntax = ToolSyntax(TOOL_PARSERS[name], {})
    with pytest.raises(RequestError, match=says):
        syntax.calls_only(syntax.tools(one_tool({}, **more)), True)


def random_schema(draw: random.Random, depth: int = 0) -> Json:
    """Return a random schema of a parameter."""
    kind = draw.choice(("plain", "plain", "list", "object", "any of", "reference"))
    if depth > 2 or kind == "plain":
        return dict(draw.choice(PLAIN))
    if kind == "list":
        return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": 2}
    if kind == "object":
        return random_object_schema(draw, depth + 1)
    if kind == "any of":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    return {"$ref": "#/$defs/shared"}


def random_object_schema(draw: random.Random, depth: int = 0) -> Json:
    """Return a random schema of an object, such as a tool's parameters."""
    names = draw.sample(("a", "b", "city", "x1", "note"), draw.randint(0, 4))
    result: Json = {
        "type": "object",
        "properties": {key: random_schema(draw, depth) for key in names},
    }
    result["required"] = draw.sample(names, draw.randint(0, len(names)))
    return result


PLAIN: list[Json] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["x", "yes", "12a"]},
    {"enum": [1, 2.5, "t"]},
    {"const": "k"},
    {"type": "integer", "minimum": 0, "maximum": 20},
    {"type": ["string", "null"]},
    {"type": ["integer", "boolean"]},
    {"type": ["string", "number", "boolean"]},
    {},
]


@pytest.mark.default_cases("hermes", "kimi_k2", "pythonic")
@pytest.mark.parametrize("name", NAMES)
def test_random_schemas(plain: Model, name: str) -> None:
    syntax = plain.syntax(name)
    draw = random.Random(name)
    ended = 0
    for seed in range(9):
        schema = random_object_schema(draw)
        schema["$defs"] = {"shared": draw.choice(PLAIN)}
        function = {"name": "f", "parameters": schema}
        sent = [{"type": "function", "function": function}]
        try:
            source = syntax.calls_only(syntax.tools(sent), False)
            text = Walk(plain, source, seed).run()
        except RequestError:
            assert name == "qwen3_coder", schema
            continue
        if text is not None:
            reply = ReplyParser(None, syntax.parser(sent)).parse(text)
            check_calls(text, reply, validators(sent))
            assert len(reply.tool_calls) == 1
            ended += 1
    assert ended > 3


HOSTILE: dict[str, Json] = {
    "a wide enum": {"enum": [f"value {number}" for number in range(2500)]},
    "a pattern of many states": {"items": {"type": "string", "pattern": "^(a|b)*a(a|b){15}$"}},
    "a pattern of much work": {"items": {"type": "string", "pattern": "(.*a){900}"}},
    "a long text": {"items": {"type": "string", "maxLength": 1_000_000}},
    "a long list": {"items": {"type": "string"}, "minItems": 100_000},
    "many choices": {"anyOf": [{"properties": {f"k{n}": {}}} for n in range(400)]},
    "a fine number": {"type": "number", "multipleOf": 1e-7, "minimum": -1e15, "maximum": 1e15},
    "a tree": {"anyOf": [{"type": "string"}, {"items": {"$ref": "#/properties/a"}}]},
}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_schemas_have_bounded_cost(plain: Model, name: str, what: str) -> None:
    """Each is refused with its field, or compiled and enforced for a while."""
    plain.compiler.prepare()
    syntax = plain.syntax(name)
    schema = {"type": "array", **HOSTILE[what]} if "items" in HOSTILE[what] else HOSTILE[what]
    began = time.process_time()
    try:
        kept = CallParams(grammar=syntax.calls_only(syntax.tools(one_tool({"a": schema})), True))
        matcher = compile_structured_output(kept, plain.compiler)
    except RequestError as error:
        assert error.field in ("tools", "tools[0].function.parameters")
    else:
        walk = Walk(plain, kept.grammar or "", 0)
        walk.matcher = matcher
        while len(walk.tokens) < 30 and matcher.fault is None:
            ids = np.flatnonzero(walk.allowed())
            walk.take(int(walk.draw.choice(ids)))
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("qwen3_coder", "a>b"),
        ("qwen3_coder", " a"),
        ("qwen3_coder", "<tool_call>"),
        ("deepseek_v3", "a```jsonb"),
        ("deepseek_v31", "a<｜tool▁sep｜>b"),
        ("kimi_k2", "a<|tool_call_end|>"),
        ("pythonic", "a b"),
        ("pythonic", "3d"),
        ("hermes", " "),
        ("hermes", "\ud800"),
    ],
)
def test_ambiguous_tool_names_are_refused(name: str, bad: str) -> None:
    syntax = ToolSyntax(TOOL_PARSERS[name], {})
    sent = [*SENT, {"type": "function", "function": {"name": bad}}]
    with pytest.raises(RequestError, match="cannot be written") as caught:
        syntax.tools(sent)
    assert caught.value.field == "tools[3].function.name"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tool", ["get", "get_weather-2", "a.b", "x" * 64])
def test_usual_tool_names_are_read(name: str, tool: str) -> None:
    reads = TOOL_PARSERS[name].reads(tool)
    assert reads or (name == "pythonic" and "-" in tool)


def test_tool_choice_must_name_a_sent_tool() -> None:
    syntax = ToolSyntax(TOOL_PARSERS["hermes"], {})
    with pytest.raises(RequestError, match="tool_choice names 'pong'"):
        syntax.tools(SENT, ToolChoice("required", frozenset({"pong"})))


@pytest.mark.parametrize(
    ("sent", "mode", "names"),
    [
        ("auto", "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        (PING, "required", {"ping"}),
        (allowed_tools("required", PING), "required", {"ping"}),
        (allowed_tools("auto", PING, PING), "auto", {"ping"}),
    ],
)
def test_tool_choice_is_read(sent: Any, mode: str, names: set[str] | None) -> None:
    assert ToolChoice.read(sent) == ToolChoice(mode, None if names is None else frozenset(names))


@pytest.mark.parametrize(
    "sent",
    [
        "any",
        None,
        5,
        [],
        {},
        {"type": "function"},
        {"type": "function", "function": {"name": 5}},
        {"type": "allowed_tools"},
        allowed_tools("auto"),
        allowed_tools("none", PING),
        allowed_tools(["auto"], PING),
        allowed_tools("auto", PING, {"type": "custom", "name": "x"}),
    ],
)
def test_invalid_tool_choice_is_refused(sent: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice=.*allowed: auto, none, required"):
        ToolChoice.read(sent)


def test_tool_schemas_have_the_bounds_of_structured_outputs() -> None:
    syntax = ToolSyntax(TOOL_PARSERS["hermes"], {})
    for schema, says in (
        ({"not": {}}, r"tools\[0\].function.parameters.*'not' at the root"),
        (nested(MAX_DEPTH), "levels"),
        (True, r"tools\[0\].function.parameters=True is not allowed"),
    ):
        function = {"name": "f", "parameters": schema, "strict": True}
        with pytest.raises(RequestError, match=says):
            syntax.tools([{"type": "function", "function": function}])


@pytest.mark.default_cases("hermes", "pythonic")
@pytest.mark.parametrize("name", NAMES)
def test_too_large_tools_error_names_tools(name: str) -> None:
    syntax = ToolSyntax(TOOL_PARSERS[name], {})
    texts = [f"t{number:060}" for number in range(700)]
    schema = {"type": "object", "properties": {"a": {"enum": texts}}}
    rest = {"type": "object", "properties": {"a": {"enum": texts[::-1]}}}
    many = [(f"f{number}", {}) for number in range(MAX_RULES)]
    for tools in ([("f", schema), ("g", rest)], many):
        functions = [{"name": expected, "parameters": parameters} for expected, parameters in tools]
        sent = [{"type": "function", "function": function} for function in functions]
        with pytest.raises(RequestError, match="tools are a grammar of") as caught:
            syntax.calls_only(syntax.tools(sent), True)
        assert caught.value.field == "tools"


def test_tool_errors_name_tools(plain: Model) -> None:
    syntax = ToolSyntax(TOOL_PARSERS["hermes"], {})
    tools = syntax.tools(one_tool({"a": {"type": "string", "pattern": "("}}))
    kept = CallParams(grammar=syntax.calls_only(tools, True))
    with pytest.raises(
        RequestError, match="tools: the keyword 'pattern' at properties.a"
    ) as caught:
        compile_structured_output(kept, plain.compiler)
    assert caught.value.field == "tools"


UNSUPPORTED_PATTERNS = [
    "(?=a)b",
    "(?!a).*",
    "(?<=a)b",
    "(?<!a)b",
    r"(a)\1",
    r"\bword\b",
    r"\cA",
    r"(?<n>a)\k<n>",
]


@pytest.mark.parametrize(
    "bound", [{"pattern": p} for p in UNSUPPORTED_PATTERNS] + [{"format": "iri"}]
)
def test_non_strict_tools_ignore_unsupported_patterns(plain: Model, bound: dict[str, str]) -> None:
    """Libraries write such patterns for addresses and dates; required tools may have them."""
    syntax = ToolSyntax(TOOL_PARSERS["hermes"], {})
    schema = {"type": "object", "properties": {"a": {"type": "string", **bound}}}
    for strict in (False, True):
        function = {"name": "f", "parameters": schema, "strict": strict}
        tools = syntax.tools([{"type": "function", "function": function}])
        kept = CallParams(grammar=syntax.calls_only(tools, True))
        if strict:
            with pytest.raises(RequestError, match=f"'{next(iter(bound))}' at properties.a"):
                compile_structured_output(kept, plain.compiler)
        else:
            compile_structured_output(kept, plain.compiler)
