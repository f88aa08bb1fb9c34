"""References, types and unions of schemas: grammars and tool parsers read them alike."""

import json
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.grammars.references import normalize
from lockstep.text.grammars.structured_output import (
    compile_structured_output,
    json_expression,
    schema_of,
)
from lockstep.text.grammars.tool_calls import ToolSyntax
from lockstep.text.parsers import TOOL_PARSERS, ReplyParser
from lockstep.text.parsers.schema import property_types
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import allows, masks_of
from tests.text.grammars.test_structured_output import MODEL, matches


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


def accepts(compiler: Compiler, schema: Any, text: str) -> bool:
    """Return whether the schema's grammar allows the text as a complete answer."""
    form = json_expression(StructuredOutputsParams(json=schema))
    return matches(compiler, f"start: {form}", text)


def call_of(schema: Any, text: str, parser: str = "qwen3_coder") -> Any:
    """Return the arguments that the parser reads."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    reply = ReplyParser(None, TOOL_PARSERS[parser](tools)).parse(text)
    assert reply.errors == []
    (call,) = reply.tool_calls
    return json.loads(call.arguments)


def parameter(value: str) -> str:
    body = f"<parameter=n>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


INTEGER = {"type": "integer"}
REFERENCES: list[tuple[str, dict[str, Any]]] = [
    ("#/$defs/Count", {"$defs": {"Count": INTEGER}}),
    ("#/$defs/My%20Count", {"$defs": {"My Count": INTEGER}}),
    ("#/$defs/app~1Count", {"$defs": {"app/Count": INTEGER}}),
    ("#/$defs/a~0b", {"$defs": {"a~b": INTEGER}}),
    ("#/$defs/a~01", {"$defs": {"a~1": INTEGER}}),
    ("#/%24defs/Count", {"$defs": {"Count": INTEGER}}),
    ("#/$defs/Record%3Cnumber%3E", {"$defs": {"Record<number>": INTEGER}}),
    ("#/definitions/a.b/anyOf/0", {"definitions": {"a.b": {"anyOf": [INTEGER]}}}),
    ("#/components/schemas/Count", {"components": {"schemas": {"Count": INTEGER}}}),
    ("#/$defs/outer/$defs/inner", {"$defs": {"outer": {"$defs": {"inner": INTEGER}}}}),
    ("#count", {"$defs": {"x": {"$anchor": "count", **INTEGER}}}),
    (
        "https://a.example/s#/$defs/Count",
        {"$id": "https://a.example/s", "$defs": {"Count": INTEGER}},
    ),
    ("#/$defs/ref0", {"$defs": {"ref0": {"$ref": "#/properties/m"}}}),
]


@pytest.mark.parametrize(("reference", "more"), REFERENCES, ids=[one for one, _ in REFERENCES])
def test_references_agree_between_grammar_and_parser(
    compiler: Compiler, reference: str, more: dict[str, Any]
) -> None:
    properties = {"n": {"$ref": reference}, "m": INTEGER}
    schema = {"type": "object", "properties": properties, "required": ["n"], **more}
    assert property_types(schema, "n") == {"integer"}
    assert call_of(schema, parameter("5")) == {"n": 5}
    assert accepts(compiler, schema, '{"n": 5}') and not accepts(compiler, schema, '{"n": "5"}')
    syntax = ToolSyntax(TOOL_PARSERS["qwen3_coder"], {})
    tools = syntax.tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    source = syntax.calls_only(tools, False)
    assert matches(compiler, source, parameter("5"))
    assert not matches(compiler, source, parameter("five"))


def test_recursive_schema(compiler: Compiler) -> None:
    tree = {"type": "object", "properties": {"sub": {"$ref": "#"}}, "additionalProperties": False}
    assert accepts(compiler, tree, '{"sub": {"sub": {}}}')
    syntax = ToolSyntax(TOOL_PARSERS["qwen3_coder"], {})
    tools = syntax.tools([{"type": "function", "function": {"name": "f", "parameters": tree}}])
    text = parameter('{"sub": {}}').replace("=n>", "=sub>")
    assert matches(compiler, syntax.calls_only(tools, False), text)
    with pytest.raises(RequestError, match="itself"):
        schema_of({"$ref": "#"}, "f")


def test_root_may_be_a_reference(compiler: Compiler) -> None:
    inner = {"type": "object", "properties": {"n": INTEGER}, "required": ["n"]}
    schema = {"$ref": "#/$defs/P", "$defs": {"P": inner}}
    assert call_of(schema, parameter("5")) == {"n": 5}
    syntax = ToolSyntax(TOOL_PARSERS["qwen3_coder"], {})
    tools = syntax.tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert matches(compiler, syntax.calls_only(tools, False), parameter("5"))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("int", "5", 5), ("Integer", "5.0", 5), ("int64", "1e3", 1000), ("float", "2.5", 2.5)),
        *(("double", "1", 1), ("bool", "True", True), ("dict", '{"a": 1}', {"a": 1})),
        *(("dict[str, int]", "{'a': True}", {"a": True}), ("list[int]", "[1]", [1])),
        *(("tuple", "[1, None]", [1, None]), ("str", "5", "5"), ("NoneType", "None", None)),
        *(("OBJECT", "{}", {}), ("any", "5", "5")),
    ],
)
def test_type_names_of_programming_languages(
    compiler: Compiler, name: str, text: str, value: Any
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": name}}, "required": ["n"]}
    assert call_of(schema, parameter(text)) == {"n": value}
    assert accepts(compiler, schema, json.dumps({"n": value}))


def case(tag: str, key: str) -> dict[str, Any]:
    properties = {"kind": {"const": tag, "default": tag, "type": "string"}, key: INTEGER}
    return {"type": "object", "properties": properties, "required": [key]}


DEFINITIONS = {"A": case("a", "x"), "B": case("b", "y")}
CASES = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]


@pytest.mark.parametrize(
    "union",
    [
        {"oneOf": CASES, "discriminator": {"propertyName": "kind"}},
        {"oneOf": CASES},
        {"anyOf": CASES, "discriminator": {"propertyName": "kind"}},
        {"oneOf": list(DEFINITIONS.values()), "discriminator": {"propertyName": "kind"}},
    ],
)
def test_tagged_unions_require_the_tag(compiler: Compiler, union: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"item": union}, "required": ["item"]}
    schema["$defs"] = DEFINITIONS
    assert accepts(compiler, schema, '{"item": {"kind": "a", "x": 1}}')
    assert accepts(compiler, schema, '{"item": {"kind": "b", "y": 1}}')
    assert not accepts(compiler, schema, '{"item": {"x": 1}}')
    assert not accepts(compiler, schema, '{"item": {"kind": "b", "x": 1}}')


def test_recursive_union(compiler: Compiler) -> None:
    leaf = case("a", "x")
    properties = {"kind": {"const": "b"}, "sub": {"$ref": "#/$defs/U"}}
    branch = {"type": "object", "properties": properties, "required": ["sub"]}
    union = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    schema = {"$ref": "#/$defs/U", "$defs": {"U": union, "A": leaf, "B": branch}}
    assert accepts(compiler, schema, '{"kind": "b", "sub": {"kind": "a", "x": 1}}')


def test_overlapping_oneof_error_suggests_anyof(compiler: Compiler) -> None:
    cases = [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]
    schema = {"type": "object", "properties": {"item": {"oneOf": cases}}, "required": ["item"]}
    with pytest.raises(RequestError, match=r"'oneOf' at properties\.item.*anyOf") as caught:
        compile_structured_output(StructuredOutputsParams(json=schema), compiler)
    assert "coerce" not in str(caught.value)


@pytest.mark.parametrize("more", [True, {}, {"description": "anything"}])
def test_empty_additional_properties_allow_any_value(compiler: Compiler, more: Any) -> None:
    assert normalize({"additionalProperties": more}, "f") == {"additionalProperties": True}


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_additional_parameters_have_the_declared_type(compiler: Compiler, name: str) -> None:
    schema = {"type": "object", "additionalProperties": INTEGER}
    syntax = ToolSyntax(TOOL_PARSERS[name], {})
    tools = syntax.tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    good, bad = (parameter("5"), parameter("x"))
    if name == "pythonic":
        good, bad = "[f(n=5)]", '[f(n="x")]'
    source = syntax.calls_only(tools, False)
    assert matches(compiler, source, good) and not matches(compiler, source, bad)
    assert call_of(schema, good, name) == {"n": 5}


def test_escapes_cannot_spell_a_named_key(compiler: Compiler) -> None:
    """JSON readers would read the named key, whose value the grammar has not checked."""
    schema = {"type": "object", "properties": {"a": INTEGER}}
    assert accepts(compiler, schema, '{"a": 1, "b": "\\n"}')
    for text in ('{"\\u0061": "x"}', '{"b": "\\ud800"}', '{"b": "\\x"}', '{"b": "\x01"}'):
        assert not accepts(compiler, schema, text)
    assert accepts(compiler, {"const": "\x01"}, '"\\u0001"'), "no other spelling is JSON"


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": DIGIT}, "patternProperties": {"^a$": {"type": "integer"}}},
        {"patternProperties": {"^a$": DIGIT}, "required": ["a"]},
        {
            "properties": {"a": DIGIT, "b.c": {"type": "boolean"}},
            "patternProperties": {r"^(a|b\.c)$": {}, "^(?:a)$": {"type": "integer"}},
        },
        {
            "allOf": [{"patternProperties": {"^a$": {"type": "integer"}}}],
            "properties": {"a": DIGIT},
        },
    ],
    ids=["declared", "required", "alternatives", "combined"],
)
def test_patterns_of_declared_names_allow_no_further_property(
    compiler: Compiler, schema: Any
) -> None:
    """A comma was allowed after the last property although no name may follow: blanks were left.

    https://github.com/guidance-ai/llguidance/issues/265
    """
    closed = {"type": "object", "additionalProperties": False, **schema}
    for one in (closed, {"type": "array", "items": closed, "maxItems": 1}):
        begin, end = ("[", "]") if one is not closed else ("", "")
        assert accepts(compiler, one, f'{begin}{{"a":1}}{end}')
        assert not accepts(compiler, one, f'{begin}{{"a":10}}{end}')
        matcher = compile_structured_output(StructuredOutputsParams(json=one), compiler)
        for token in compiler.tokenizer.encode(f'{begin}{{"a":1', add_special_tokens=False):
            matcher.accept([token])
        (mask,) = masks_of(matcher)
        texts = [compiler.tokenizer.token_bytes(i) for i in range(len(compiler.tokenizer))]
        after = {texts[i].strip() for i in range(len(texts)) if allows(mask, i)}
        assert b"}" in after
        may_continue = "b.c" in closed.get("properties", {})
        assert any(text.startswith(b",") for text in after) == may_continue


def test_patterns_of_declared_names_bind_their_values(compiler: Compiler) -> None:
    schema = {
        "type": "object",
        "properties": {"a": DIGIT, "x": {"type": "boolean"}},
        "patternProperties": {"^a$": {"minimum": 5}, "^x|y$": {"const": True}, "^z$": {}},
        "additionalProperties": False,
    }
    assert accepts(compiler, schema, '{"a":5,"x":true,"z":1}')
    for text in ('{"a":4}', '{"x":false}', '{"b":1}'):
        assert not accepts(compiler, schema, text)


def test_patterns_of_one_name_are_combined_in_one_list() -> None:
    patterns = {"^a$": {"minimum": 1}, "^(a)$": {"minimum": 2}, "^(?:a)$": {"minimum": 3}}
    normal_form = normalize({"patternProperties": patterns}, "f")
    assert normal_form == {"properties": {"a": {"allOf": [*patterns.values()]}}}


def test_copies_of_names_of_patterns_are_bounded() -> None:
    schema: dict[str, Any] = DIGIT
    for _ in range(4):  # 100 million copies from 2,000 characters
        names = "|".join(f"n{i}" for i in range(100))
        schema = {"type": "object", "patternProperties": {f"^({names})$": schema}}
    with pytest.raises(RequestError, match="list too many names"):
        normalize(schema, "f")


def test_names_of_patterns_where_a_reference_leads_to_no_schema() -> None:
    part = {"patternProperties": {"^a$": DIGIT}, "required": [{}]}
    with pytest.raises(RequestError, match="'required'"):
        schema_of({"properties": {"p": {"$ref": "#/x/y"}}, "x": {"y": part}}, "f")


@pytest.mark.parametrize("reference", [{}, [1], 5, None])
@pytest.mark.parametrize("keyword", ["oneOf", "anyOf"])
def test_reference_in_a_union_may_be_no_text(keyword: str, reference: Any) -> None:
    """The compiler refuses it later, with its place."""
    schema = {keyword: [{"$ref": reference}, {"type": "null"}]}
    assert normalize(schema, "f") == schema
