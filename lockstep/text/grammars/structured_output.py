"""Structured output: the grammar of an answer from a request's structured_outputs.

A source is a grammar in llguidance's Lark. Every input is bounded before it is processed
(lockstep.sampling_params), and refused if it would not be enforced.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import StructTag, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_REGEX_CHARACTERS,
    StructuredOutputsParams,
)
from lockstep.text.grammars.calendar_formats import replace_calendar_formats
from lockstep.text.grammars.compiler import (
    ROW_ITEMS,
    WRITTEN_ROW_ITEMS,
    Compiler,
    GrammarFault,
    Matcher,
    first_line,
)
from lockstep.text.grammars.conjunctions import LITERAL, check_conjunctions, check_operators
from lockstep.text.grammars.endless_schemas import check_finite, drop_endless
from lockstep.text.grammars.exclusive_bounds import move_whole_bounds
from lockstep.text.grammars.integer_bounds import add_integer_bounds
from lockstep.text.grammars.json_schema import (
    check_depth,
    check_keywords,
    close_objects,
    drop_ineffective,
    drop_refused,
    locate,
    replace_unevaluated,
)
from lockstep.text.grammars.lark import Rules, either, escapes_of, literal, sequence
from lockstep.text.grammars.lookarounds import replace_lookarounds
from lockstep.text.grammars.multiples import check_multiples, objects_of_schemas, schemas_of
from lockstep.text.grammars.numbers import check_numbers
from lockstep.text.grammars.property_names import replace_property_names
from lockstep.text.grammars.references import normalize

MAX_RULES = 1000
"""Maximum rules and terminals of a grammar. llguidance follows one into the next by recursion, and
4,000 take more than half of a stack of 8 MiB."""
RULE = re.compile(r"^[ \t]*[?!]*[A-Za-z_][\w.-]*[ \t]*(\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
"""Head of a rule in Lark."""
ATTRIBUTE = re.compile(r"\b(max_tokens|stop|stop_capture|temperature)\s*=")
"""Attributes of Lark rules that llguidance does not roll back with the tokens that set them."""
MAX_STRUCTURES = 256
"""Maximum tags, triggers and elements of a structural tag."""
UNSUPPORTED_OPTIONS = ("at_least_one", "stop_after_first", "excludes")
"""Options of triggered_tags that are not supported."""
FORMAT_FIELDS = {
    "json_schema": ("type", "json_schema"),
    "const_string": ("type", "value"),
    "regex": ("type", "pattern"),
    "tag": ("type", "begin", "content", "end"),
    "sequence": ("type", "elements"),
    "or": ("type", "elements"),
    "triggered_tags": ("type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
}
"""Fields of each format of a structural tag."""
UNCHANGED = {"style": "json"}
"""Further fields, with the value that equals the default behaviour."""
ANY_OBJECT = {"type": "object"}
BLANKS = r"[ \t]{1,2}|[ \t]{0,2}(\r?\n){1,2}[ \t]{0,64}"
"""Regex of the optional blanks of JSON: two of them, or two line ends with an indentation. Without
a bound, a model that finds no value may write blanks until max_tokens."""
Json = dict[str, Any]


def compile_structured_output(params: StructuredOutputsParams, compiler: Compiler) -> Matcher:
    """Return the grammar that a request asks for. Raises RequestError that names the fault."""
    field = params.field
    source = _GRAMMARS[params.kind](params, field)
    for objects in objects_of_schemas(source):
        check_numbers(objects, field)
    check_multiples(source, field)
    check_conjunctions(source, field)
    try:
        items = WRITTEN_ROW_ITEMS if params.is_client_grammar else ROW_ITEMS
        return compiler.matcher(source, items, _json_after(params))
    except GrammarFault as fault:
        where, why = _locate_fault(params, source, compiler, str(fault)) or ("", str(fault))
        raise RequestError(
            f"{field}{where} cannot be enforced: {why}. Correct it.", field
        ) from None


def _json_after(params: StructuredOutputsParams) -> tuple[str, ...] | None:
    """Return GrammarRecipe.json_after of a checked request."""
    if params.kind != "structural_tag":
        return params.json_after
    sent = _parse_tag(params, params.field)
    if "format" in sent:
        return () if sent["format"]["type"] == "json_schema" else None
    # The end of the JSON is known by its last bracket, so that it must be an object or a list.
    containers = [
        structure for structure in sent["structures"] if _is_container(structure, params.field)
    ]
    begins = [structure["begin"] for structure in containers]
    return tuple(begins) or None


def _is_container(structure: Json, field: str) -> bool:
    """Return whether a structure's schema is an object or a list."""
    schema = schema_of(structure.get("schema", ANY_OBJECT), field)
    return isinstance(schema, dict) and schema.get("type") in ("object", "array")


def _locate_fault(
    params: StructuredOutputsParams, source: str, compiler: Compiler, fault: str
) -> tuple[str, str] | None:
    """Return (place in the schema, reason) of a fault as precisely as it can be located."""

    def fault_of(part: Any) -> str | None:
        return compiler.fault_of(f"start: {_schema_expression(part, params)}")

    location = locate(schemas_of(source), fault, fault_of)
    return None if location is None else (f": {location[0]}", location[1])


def schema_of(value: Any, field: str, strict: bool = True) -> Any:
    """Return a checked JSON schema that was sent as an object or as text.

    strict: refuse unsupported keywords instead of dropping them.
    """
    schema = value
    if isinstance(value, str):
        schema = _from_json(value, field)
    _check_size(schema, field)
    schema = replace_lookarounds(replace_unevaluated(drop_ineffective(schema)))
    schema = replace_property_names(schema)
    schema = schema if strict else drop_refused(schema)
    check_keywords(schema, field)
    if strict:
        check_finite(schema, field)
    else:
        schema = drop_endless(schema)
    normal_form = normalize(schema, field)
    if normal_form != schema:
        _check_size(normal_form, field)
        check_keywords(normal_form, field)
    return normal_form


def _check_size(value: Any, field: str) -> None:
    check_depth(value, field)
    if len(_to_json(value, field)) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{field} is too long; allowed: at most {MAX_GRAMMAR_CHARACTERS} characters. "
            "Shorten it.",
            field,
        )


def _from_json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{field} is not valid JSON ({brief(str(error))}); allowed: an object, or JSON text of "
            "one. Send one of them.",
            field,
        ) from None


def _to_json(value: Any, field: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"{field} cannot be written as JSON: {brief(str(error))}. Send JSON values only.", field
        ) from None


def json_expression(params: StructuredOutputsParams) -> str | None:
    """Return the JSON that an answer must match as a Lark expression; None if it need not be JSON.

    Raises: RequestError.
    """
    if params.kind == "json_object":
        return _schema_expression(ANY_OBJECT, params)
    if params.kind != "json":
        return None
    schema = schema_of(params.json, params.field)
    return _schema_expression(
        close_objects(schema) if params.disable_additional_properties else schema, params
    )


def _schema_expression(schema: Any, params: StructuredOutputsParams) -> str:
    if params.disable_any_whitespace:
        return "%json " + _guided_schema(schema, whitespace_flexible=False)
    pattern = BLANKS if params.whitespace_pattern is None else params.whitespace_pattern
    return "%json " + _guided_schema(schema, whitespace_pattern=pattern)


def _guided_schema(schema: Any, **blanks: Any) -> str:
    """Return a schema for llguidance. blanks: its options of blanks."""
    options = {"json_allowed_escapes": escapes_of(schema), **blanks}
    bounded = {"allOf": [schema]}
    if isinstance(schema, dict):
        bounded = add_integer_bounds(move_whole_bounds(replace_calendar_formats(schema)))
    return json.dumps({**bounded, "x-guidance": options})


def _json_grammar(params: StructuredOutputsParams, field: str) -> str:
    return f"start: {json_expression(params)}"


def _regex_grammar(params: StructuredOutputsParams, field: str) -> str:
    return f"start: /{regex_to_lark(str(params.regex), use_ascii='')}/"


def _choice_grammar(params: StructuredOutputsParams, field: str) -> str:
    lines = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())
    return f"start: {lines}"


def _lark_grammar(params: StructuredOutputsParams, field: str) -> str:
    try:
        source = any_to_lark(str(params.grammar))
    except Exception as error:  # the GBNF converter raises plain Exception
        raise RequestError(
            f"{field} cannot be read: {first_line(str(error))}; allowed: Lark or GBNF. Correct it.",
            field,
        ) from None
    check_lark(source, field)
    if params.is_client_grammar:
        check_operators(source, field)
    return source


def check_lark(source: str, field: str) -> None:
    """Raise RequestError for too many rules, and for attributes that drafts would affect."""
    attribute = ATTRIBUTE.search(LITERAL.sub("", source))
    if attribute is not None:
        raise RequestError(
            f"{field}: the attribute {attribute[1]!r} of a rule is not supported: its effect "
            "would depend on drafts. Remove it.",
            field,
        )
    rules = sum(1 for _ in RULE.finditer(source))
    if rules > MAX_RULES:
        raise RequestError(
            f"{field} has {rules} rules; allowed: at most {MAX_RULES}. Write fewer, longer ones.",
            field,
        )


def _parse_tag(params: StructuredOutputsParams, field: str) -> Any:
    """Return a structural tag's structures and triggers, or its format without free text."""
    tag = params.structural_tag
    sent = _from_json(tag, field) if isinstance(tag, str) else tag
    _check_size(sent, field)
    if isinstance(sent, dict) and "format" in sent:
        form = sent["format"]
        fixed = isinstance(form, dict) and form.get("type") in _FORMATS
        return {"format": form} if fixed else _parse_triggered_tags(form, field)
    return sent


def _structural_tag_grammar(params: StructuredOutputsParams, field: str) -> str:
    sent = _parse_tag(params, field)
    if isinstance(sent, dict) and "format" in sent:
        rules = Rules({})
        return rules.source(_format_rule(sent["format"], rules, field))
    structures = sent.get("structures") if isinstance(sent, dict) else None
    triggers = sent.get("triggers") if isinstance(sent, dict) else None
    if not _are_structures(structures) or not _are_texts(triggers):
        raise RequestError(
            f"{field}={brief(sent)} is not supported; allowed: an object of structures (begin, "
            "schema and end of each) and triggers (texts). Send one.",
            field,
        )
    assert structures is not None and triggers is not None
    tags = [_struct_tag(structure, triggers, field) for structure in structures]
    return free_text_with_tags(tags)


def _format_rule(form: Any, rules: Rules, field: str) -> str:
    """Return the Lark rule of a format without free text. The tag's depth is bounded."""
    make = _FORMATS.get(str(form.get("type"))) if isinstance(form, dict) else None
    if make is None:
        kind = form.get("type") if isinstance(form, dict) else form
        raise RequestError(
            f"{field}: the format {brief(kind)} is not supported there; allowed: "
            f"{', '.join(_FORMATS)}, and 'triggered_tags' alone. Use one of them.",
            field,
        )
    _check_fields(form, form["type"], field)
    expression = make(form, rules, field)
    if expression is None or len(rules) > MAX_RULES - 1:
        raise RequestError(
            f"{field}: the format {brief(form)} is incomplete, or the tag has more than "
            f"{MAX_RULES} parts. Add the missing fields, or send fewer parts.",
            field,
        )
    return rules.rule(expression)


def _check_fields(form: Json, kind: str, field: str) -> None:
    """Raise RequestError for an unsupported field of a format that is set."""
    allowed = FORMAT_FIELDS[kind]
    for name, value in form.items():
        if name not in allowed and value not in (None, False, [], UNCHANGED.get(name)):
            raise RequestError(
                f"{field}: {brief(name)[1:-1]}={brief(value)} of the format {kind!r} is not "
                f"supported; allowed: {', '.join(allowed)}. Leave it out.",
                field,
            )


def _json_format(form: Json, rules: Rules, field: str) -> str | None:
    if "json_schema" not in form:
        return None
    schema = schema_of(form["json_schema"], field)
    return _schema_expression(schema, StructuredOutputsParams(json_object=True))


def _text_format(form: Json, rules: Rules, field: str) -> str | None:
    value = form.get("value")
    return literal(value) if isinstance(value, str) and value else None


def _regex_format(form: Json, rules: Rules, field: str) -> str | None:
    pattern = form.get("pattern")
    if not isinstance(pattern, str) or len(pattern) > MAX_REGEX_CHARACTERS:
        return None
    return rules.terminal(f"/{regex_to_lark(pattern, use_ascii='')}/")


def _tag_format(form: Json, rules: Rules, field: str) -> str | None:
    begin, end = form.get("begin"), form.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        return None
    return sequence(
        literal(begin) if begin else "",
        _format_rule(form.get("content"), rules, field),
        literal(end) if end else "",
    )


def _element_rules(form: Json, rules: Rules, field: str) -> list[str]:
    elements = form.get("elements")
    if not isinstance(elements, list) or len(elements) > MAX_STRUCTURES:
        return []
    return [_format_rule(element, rules, field) for element in elements]


def _sequence_format(form: Json, rules: Rules, field: str) -> str | None:
    return sequence(*_element_rules(form, rules, field)) or None


def _or_format(form: Json, rules: Rules, field: str) -> str | None:
    parts = _element_rules(form, rules, field)
    return either(parts) if parts else None


_FORMATS: dict[str, Callable[[Json, Rules, str], str | None]] = {
    "json_schema": _json_format,
    "const_string": _text_format,
    "regex": _regex_format,
    "tag": _tag_format,
    "sequence": _sequence_format,
    "or": _or_format,
}
"""Formats without free text -> function that returns the Lark expression of one."""


def _parse_triggered_tags(form: Any, field: str) -> Json:
    """Convert a `format` of triggered tags (xgrammar's current form) to structures and triggers."""
    kind = form.get("type") if isinstance(form, dict) else None
    tags = form.get("tags") if isinstance(form, dict) else None
    unsupported = [
        name for name in UNSUPPORTED_OPTIONS if isinstance(form, dict) and form.get(name)
    ]
    if kind != "triggered_tags" or unsupported or not _are_tags(tags):
        raise RequestError(
            f"{field}: the format {brief(kind)} is not supported as sent ({brief(form)}); allowed: "
            "'triggered_tags' whose tags have a json_schema as content, without "
            f"{', '.join(UNSUPPORTED_OPTIONS)}; or {', '.join(_FORMATS)}. Use one of them.",
            field,
        )
    assert tags is not None
    _check_fields(form, "triggered_tags", field)
    for tag in tags:
        _check_fields(tag, "tag", field)
        _check_fields(tag["content"], "json_schema", field)
    structures = [
        {"begin": tag.get("begin"), "schema": tag["content"]["json_schema"], "end": tag.get("end")}
        for tag in tags
    ]
    return {"structures": structures, "triggers": form.get("triggers")}


def _are_tags(value: Any) -> bool:
    """Return whether a value is a list of tags around JSON."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_STRUCTURES:
        return False
    contents = [tag.get("content") if isinstance(tag, dict) else None for tag in value]
    return all(
        isinstance(content, dict)
        and content.get("type") == "json_schema"
        and "json_schema" in content
        for content in contents
    )


def _are_structures(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_STRUCTURES:
        return False
    return all(
        isinstance(structure, dict)
        and isinstance(structure.get("begin"), str)
        and isinstance(structure.get("end"), str)
        for structure in value
    )


def _are_texts(value: Any) -> bool:
    sized = isinstance(value, list) and 1 <= len(value) <= MAX_STRUCTURES
    return sized and all(isinstance(text, str) and text for text in value)


def _struct_tag(structure: Json, triggers: Sequence[str], field: str) -> StructTag:
    """Return a structure under the first trigger that is a prefix of its beginning."""
    begin = structure["begin"]
    trigger = next((text for text in triggers if begin.startswith(text)), None)
    if trigger is None:
        raise RequestError(
            f"{field}: the structure that begins with {brief(begin)} starts with no trigger; "
            "allowed: beginnings that start with one. Add a trigger.",
            field,
        )
    schema = schema_of(structure.get("schema", ANY_OBJECT), field)
    grammar = _guided_schema(schema, whitespace_pattern=BLANKS)
    return StructTag(trigger=trigger, begin=begin, grammar=grammar, end=structure["end"])


def free_text_with_tags(structures: list[StructTag]) -> str:
    """Return the Lark of free text in which a trigger begins one of its structures."""
    return StructTag.to_grammar(structures, assume_special=False)


_GRAMMARS: dict[str, Callable[[StructuredOutputsParams, str], str]] = {
    "json": _json_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _lark_grammar,
    "json_object": _json_grammar,
    "structural_tag": _structural_tag_grammar,
}
