"""Schemas and structural tags: what is refused, with its position, and what is enforced."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lockstep.errors import RequestError
from lockstep.sampling_params import StructuredOutputsParams
from lockstep.text.grammars.compiler import Compiler, GrammarFault, Matcher
from lockstep.text.grammars.json_schema import (
    MAX_DEPTH,
    MAX_REFERENCES,
    MAX_SEARCHED_PARTS,
    NEEDED,
    REFUSED,
    close_objects,
    locate,
)
from lockstep.text.grammars.structured_output import MAX_RULES, compile_structured_output
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import masks_of

MODEL = Path(__file__).parents[3] / "lockstep" / "assets" / "model"


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer), tokenizer.eos_ids)


def matches(compiler: Compiler, source: str, text: str) -> bool:
    """Return whether a text is a complete answer of a grammar."""
    matcher = compiler.matcher(source)
    for token in compiler.tokenizer.encode(text, add_special_tokens=False):
        mask = masks_of(matcher)[0]
        if not mask[token // 8] >> token % 8 & 1:
            return False
        matcher.accept([token])
    end = min(compiler.ends)
    return bool(masks_of(matcher)[0][end // 8] >> end % 8 & 1)


def compiled(compiler: Compiler, **fields: Any) -> Matcher:
    return compile_structured_output(StructuredOutputsParams(**fields), compiler)


LIST = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form",
    [
        {"json": LIST},
        {"json_object": True},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": LIST}}},
        {
            "structural_tag": {
                "structures": [{"begin": "<f>", "schema": LIST, "end": "</f>"}],
                "triggers": ["<f>"],
            }
        },
    ],
    ids=["json", "json_object", "format", "structures"],
)
def test_blanks_of_json_are_bounded(compiler: Compiler, form: dict[str, Any]) -> None:
    """Answers ran to max_tokens in blanks, as those were allowed without end.

    https://github.com/vllm-project/vllm/issues/38696
    https://github.com/jundot/omlx/issues/2990
    https://github.com/sgl-project/sglang/issues/8250
    """
    source = compiled(compiler, **form).recipe.source
    begin, end = ("<f>", "</f>") if "structures" in form.get("structural_tag", {}) else ("", "")

    def is_allowed(text: str) -> bool:
        return matches(compiler, source, begin + text + end)

    deep: Any = 1
    for _ in range(12):
        deep = [deep, {"b": 2}]
    for indent in (None, 1, 2, 4, "\t"):
        written = json.dumps({"a": [deep]}, indent=indent)
        assert is_allowed(written) and is_allowed(written.replace("\n", "\r\n"))
    assert is_allowed('{"a":[1,2]}') and is_allowed('{ "a" :  [ \n\n 1 , 2 ]}')
    for blanks in ("   ", "\n\n\n", "\n \n", "\n" + 65 * " ", "\t\t\t"):
        assert not is_allowed(f'{{"a":{blanks}[1]}}')


@pytest.mark.parametrize("keyword", [name for name in REFUSED if name not in NEEDED])
def test_unsupported_keywords_are_named(compiler: Compiler, keyword: str) -> None:
    # Without other schemas of the same value, unevaluated ones are enforced.
    part = {"anyOf": [{}], keyword: {"maxLength": 1}}
    schema = {"type": "object", "properties": {"a": {"items": [{}, part]}}}
    with pytest.raises(RequestError, match="properties.a.items.1.") as caught:
        compiled(compiler, json=schema)
    assert repr(keyword) in str(caught.value)
    assert caught.value.field == "structured_outputs.json"


@pytest.mark.parametrize("keyword", REFUSED)
def test_properties_named_like_keywords_are_allowed(compiler: Compiler, keyword: str) -> None:
    named = {"type": "object", "properties": {keyword: {"const": {keyword: 1}}}}
    compiled(compiler, json=named)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "text"}}},
            r"'type' at properties\.a .*text",
        ),
        (
            {"anyOf": [{"type": "string"}, {"title": "b", "pattern": "(?=a)", "maxLength": 3}]},
            r"'pattern' at anyOf\[1\] .*look-around",
        ),
        (
            {"$defs": {"x": {"format": "iri", "type": "string"}}, "$ref": "#/$defs/x"},
            r"'format' at \$defs\.x .*iri",
        ),
        ({"properties": 3}, "'properties' at the root"),
        ({"required": "a"}, "'required' at the root"),
        ({"items": 3}, "items is 3"),
        ({"items": {"$ref": "#/$defs/none"}}, r"'\$ref' at items .*none"),
        ({"$ref": "http://example.com/schema"}, r"'\$ref' at the root .*example\.com"),
        ('{"type": ', "is not valid JSON"),
        ("[" * 5000, "JSON|levels"),
        ({"const": "x" * 70_000}, "at most 65536 characters"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "'minimum' at the root"),
    ],
)
def test_schema_errors_name_the_position(compiler: Compiler, schema: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        compiled(compiler, json=schema)


def nested(levels: int) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        result = {"type": "array", "items": result}
    return result


def test_depth_is_bounded(compiler: Compiler) -> None:
    compiled(compiler, json=nested(MAX_DEPTH - 1))
    with pytest.raises(RequestError, match=f"more than {MAX_DEPTH} levels"):
        compiled(compiler, json=nested(MAX_DEPTH))
    with pytest.raises(RequestError, match="levels"):
        compiled(compiler, json=nested(5000))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": ["a"] * 2000}, "structured_outputs.choice"),
        ({"choice": ["x" * 40_000] * 2}, "structured_outputs.choice"),
        ({"choice": ["\ud800"]}, "structured_outputs.choice"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"regex": "a" * 4097}, "structured_outputs.regex"),
        ({"grammar": "x" * 70_000}, "structured_outputs.grammar"),
        ({"json": 3.5}, "structured_outputs.json"),
        ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structural_tag": {}, "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"json_object": True, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties",
        ),
    ],
)
def test_exactly_one_valid_kind_is_required(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.field == field


def test_pydantic_model_is_a_schema() -> None:
    class Pair(BaseModel):
        x: int

    assert StructuredOutputsParams(json=Pair).json == Pair.model_json_schema()


def test_objects_without_additional_properties(compiler: Compiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = '{"b":1}'
    for closes in (False, True):
        fields: dict[str, Any] = {"json": schema, "disable_additional_properties": closes}
        matcher = compile_structured_output(StructuredOutputsParams(**fields), compiler)
        matcher.accept(compiler.tokenizer.encode(text, add_special_tokens=False))
        assert (matcher.fault is None) == (not closes)


def test_close_objects_changes_schemas_only() -> None:
    named = {"properties": {"properties": {"const": {"properties": {}}}}}
    inner = {"properties": {"a": {}}, "additionalProperties": False}
    assert close_objects(named) == {**named, "additionalProperties": False}
    assert close_objects({"anyOf": [{"properties": {"a": {}}}, True]}) == {"anyOf": [inner, True]}


def chain(rules: int) -> str:
    links = "".join(f"a{i}: a{i + 1}\n" for i in range(rules - 2))
    return f'start: a0\n{links}a{rules - 2}: "x"'


def test_rule_chains_are_bounded(compiler: Compiler) -> None:
    """The compiler recurses along chains; a long one would crash the process."""
    compiled(compiler, grammar=chain(MAX_RULES))
    with pytest.raises(RequestError, match=f"{MAX_RULES + 1} rules"):
        compiled(compiler, grammar=chain(MAX_RULES + 1))
    for count in (MAX_REFERENCES, MAX_REFERENCES + 1):
        links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count - 1)}
        links[f"a{count - 1}"] = {"type": "integer"}
        schema = {"$ref": "#/$defs/a0", "$defs": links}
        if count == MAX_REFERENCES:
            compiled(compiler, json=schema)
        else:
            with pytest.raises(RequestError, match=f"{count} references"):
                compiled(compiler, json=schema)


@pytest.mark.parametrize(
    "source",
    [
        "start: " + "(" * 9000 + '"a"' + ")" * 9000,
        "start: " + "[" * 9000,
        "start: %json " + '{"items":' * 999,
        "start: A\nA: B",
        "root ::= ((",
        "root ::= " + "(" * 9000,
        "x",
    ],
    ids=range(7),
)
def test_invalid_grammars_are_refused(compiler: Compiler, source: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(compiler, grammar=source)
    assert caught.value.field == "structured_outputs.grammar"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("attribute", ["max_tokens=3", 'stop="x"', "temperature=0.5"])
def test_stop_attributes_are_refused(compiler: Compiler, attribute: str) -> None:
    with pytest.raises(RequestError, match=attribute.partition("=")[0]):
        compiled(compiler, grammar=f"start: a\na[lazy, {attribute}]: /[a-z]+/")
    compiled(compiler, grammar=f"start: {json.dumps(attribute)} a\na[lazy]: /stop=[a-z]+/")


TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def triggered(**more: Any) -> dict[str, Any]:
    """Return TAG in xgrammar's current notation."""
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in TAG["structures"]
    ]
    form = {"type": "triggered_tags", "triggers": TAG["triggers"], "tags": tags, **more}
    return {"type": "structural_tag", "format": form}


LARGE = {"type": "integer", "multipleOf": 2**31}


@pytest.mark.parametrize(
    "fields",
    [
        {"json": LARGE},
        {"grammar": f"start: %json {json.dumps(LARGE)}"},
        {
            "structural_tag": {
                "structures": [{"begin": "<a", "schema": LARGE, "end": ""}],
                "triggers": ["<"],
            }
        },
    ],
    ids=["json", "grammar", "structural_tag"],
)
def test_large_multiples_are_refused(compiler: Compiler, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="multipleOf") as caught:
        compiled(compiler, **fields)
    assert caught.value.field == f"structured_outputs.{next(iter(fields))}"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "binary"},
        {"type": ["integer", "null"], "format": "int64"},
        {"properties": {"format": {"format": "path", "type": "string", "maxLength": 3}}},
        {"$defs": {"x": {"format": "password"}}, "items": {"$ref": "#/$defs/x"}},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "array", "uniqueItems": False, "minContains": 2},
        {"type": "string", "nullable": False},
        {"type": "object", "dependentRequired": {}, "unevaluatedProperties": True},
        {"type": "object", "properties": {"if": {"uniqueItems": False}}},
        {"type": "object", "then": {"required": ["x"]}, "else": False},
    ],
)
def test_ineffective_keywords_do_not_change_the_grammar(
    compiler: Compiler, schema: dict[str, Any]
) -> None:
    plain = json.loads(json.dumps(schema), object_pairs_hook=drop_ineffective)
    assert compiled(compiler, json=schema).recipe == compiled(compiler, json=plain).recipe


def drop_ineffective(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a schema's object without keywords that restrict nothing here; a property named like
    one stays."""
    names = ("propertyNames", "then", "else", "dependentRequired", "unevaluatedProperties")
    kept = {key: value for key, value in pairs if key not in names}
    maybe = ("format", "uniqueItems", "minContains", "nullable")
    return {
        key: value for key, value in kept.items() if key not in maybe or isinstance(value, dict)
    }


@pytest.mark.parametrize(
    ("unevaluated", "plain"),
    [
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ),
        (
            {"additionalProperties": {"type": "null"}, "unevaluatedProperties": False},
            {"additionalProperties": {"type": "null"}},
        ),
        (
            {"prefixItems": [{"type": "null"}], "unevaluatedItems": {"type": "boolean"}},
            {"prefixItems": [{"type": "null"}], "items": {"type": "boolean"}},
        ),
    ],
)
def test_unevaluated_is_additional_without_other_schemas(
    compiler: Compiler, unevaluated: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert compiled(compiler, json=unevaluated).recipe == compiled(compiler, json=plain).recipe


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"$ref": "#/$defs/x", "$defs": {"x": {}}, "unevaluatedProperties": False},
        {"contains": {"type": "null"}, "unevaluatedItems": False},
        {"type": "array", "uniqueItems": 0},
        {"if": {"required": ["x"]}, "else": False},
    ],
)
def test_effective_keywords_are_refused(compiler: Compiler, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="is not supported, and would change the answer"):
        compiled(compiler, json=schema)


def test_usual_multiples_compile(compiler: Compiler) -> None:
    compiled(compiler, json={"type": "number", "multipleOf": 0.01})
    compiled(compiler, json={"type": "integer", "multipleOf": 3600})


@pytest.mark.parametrize(
    "spelled", [TAG, json.dumps(TAG), triggered(), triggered(at_least_one=False)]
)
def test_tags_are_enforced_after_their_triggers(compiler: Compiler, spelled: Any) -> None:
    for text, fits in (
        ("free <text", True),
        ("so <f=a>12</f> and <f=b>true</f>.", True),
        ("so <f=a>true</f>", False),
        ("so <f=c>", False),
    ):
        matcher = compile_structured_output(
            StructuredOutputsParams(structural_tag=spelled), compiler
        )
        matcher.accept(compiler.tokenizer.encode(text, add_special_tokens=False))
        assert (matcher.fault is None) == fits, text


@pytest.mark.parametrize(
    "tag",
    [
        {"type": "structural_tag", "format": {"type": "json_schema"}},
        triggered(at_least_one=True),
        triggered(tags=[]),
        triggered(tags=[{"begin": "<f=a>", "content": {"type": "any_text"}, "end": ""}]),
        triggered(tags=5),
        triggered(triggers="<f="),
        triggered(other=5),
        {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
        },
        {
            "type": "structural_tag",
            "format": {"type": "regex", "pattern": "a+", "excludes": ["aa"]},
        },
        {
            "type": "structural_tag",
            "format": {"type": "sequence", "elements": [], "at_least_one": True},
        },
        {"type": "structural_tag", "format": []},
        {"structures": [], "triggers": ["<"]},
        {"structures": [{"begin": "<a", "end": 3}], "triggers": ["<"]},
        {"structures": [{"begin": "<a", "end": ""}], "triggers": ["["]},
        {"structures": [{"begin": "<a", "end": "", "schema": {"not": {}}}], "triggers": ["<"]},
        {"structures": [{"begin": "<a" + "x" * 70_000, "end": ""}], "triggers": ["<"]},
        {"structures": [{"begin": "<a", "end": ""}], "triggers": ["<"], "more": nested(5000)},
        "no json",
    ],
)
def test_invalid_tags_are_refused(compiler: Compiler, tag: Any) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(compiler, structural_tag=tag)
    assert caught.value.field == "structured_outputs.structural_tag"


def test_formats_of_fixed_parts_are_the_complete_answer(compiler: Compiler) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    word = {"type": "or", "elements": [{"type": "const_string", "value": "a"}, content]}
    parts = [tag, word, {"type": "regex", "pattern": "[x-z]+"}]
    form = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    for text, fits in (
        ("<n>5</n>azz", True),
        ("<n>5</n>7x", True),
        ("<n>x</n>", False),
        ("a", False),
    ):
        matcher = compiled(compiler, structural_tag=form)
        matcher.accept(compiler.tokenizer.encode(text, add_special_tokens=False))
        assert (matcher.fault is None) == fits, text


@pytest.mark.parametrize("kind", ["any_text", "grammar", "tags_with_separator", "triggered_tags"])
def test_unsupported_formats_are_named(compiler: Compiler, kind: str) -> None:
    for form in ({"type": kind}, {"type": "sequence", "elements": [{"type": kind}]}):
        with pytest.raises(RequestError, match=kind):
            compiled(compiler, structural_tag={"type": "structural_tag", "format": form})


def test_error_search_is_bounded() -> None:
    tried = []
    schema = {"properties": {f"p{number}": {} for number in range(5000)}}
    assert locate([schema], "a fault", tried.append) is None
    assert len(tried) == MAX_SEARCHED_PARTS


def test_errors_of_llguidance_are_one_line(compiler: Compiler) -> None:
    with pytest.raises(GrammarFault) as caught:
        compiler.matcher("start: /(a/")
    assert "\n" not in str(caught.value)
    assert re.search("unclosed group", str(caught.value))
