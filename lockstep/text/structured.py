"""Structured output: from what a request asks for to the grammar of its answer.

A source is a grammar in llguidance's Lark. Every input is bounded before it is looked at
(lockstep.sampling_params) and refused where it would not be obeyed.
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
from lockstep.text.conjunctions import LITERAL, check_conjunctions, check_operators
from lockstep.text.grammar import (
    ROW_ITEMS,
    WRITTEN_ROW_ITEMS,
    Compiler,
    GrammarFault,
    Matcher,
    first_line,
)
from lockstep.text.integers import with_bounded_integers
from lockstep.text.json_schema import (
    check_depth,
    check_keywords,
    closed,
    locate,
    without_refused,
    without_void,
)
from lockstep.text.multiples import check_multiples, objects_of_schemas, schemas_of
from lockstep.text.numbers import check_numbers
from lockstep.text.parsers.writing import Rules, either, escapes_of, literal, sequence
from lockstep.text.references import canonical

MOST_RULES = 1000
"""Rules and terminals of a grammar. llguidance follows one into the next on the stack of its
thread, and of 8 MiB it takes more than half at 4,000."""
RULE = re.compile(r"^[ \t]*[?!]*[A-Za-z_][\w.-]*[ \t]*(\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
ATTRIBUTE = re.compile(r"\b(max_tokens|stop|stop_capture|temperature)\s*=")
"""Attributes of Lark rules that llguidance does not take back with the tokens that set them."""
MOST_STRUCTURES = 256
UNHELD = ("at_least_one", "stop_after_first", "excludes")
"""Of triggered_tags, what is not supported."""
FORM_FIELDS = {
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
"""Further fields with the value that says what happens anyway."""
ANY_OBJECT = {"type": "object"}
Json = dict[str, Any]


def compile_wanted(wanted: StructuredOutputsParams, compiler: Compiler) -> Matcher:
    """The grammar that a request asks for. Raises RequestError, which names what is wrong."""
    field = wanted.field
    source = _SOURCES[wanted.kind](wanted, field)
    for objects in objects_of_schemas(source):
        check_numbers(objects, field)
    check_multiples(source, field)
    check_conjunctions(source, field)
    try:
        items = WRITTEN_ROW_ITEMS if wanted.written else ROW_ITEMS
        return compiler.matcher(source, items, _json_after(wanted))
    except GrammarFault as fault:
        where, why = _place_of(wanted, source, compiler, str(fault)) or ("", str(fault))
        raise RequestError(
            f"{field}{where} cannot be enforced: {why}. Correct this part, or leave it out.",
            field,
        ) from None


def _json_after(wanted: StructuredOutputsParams) -> tuple[str, ...] | None:
    """Return where an answer is JSON: see GrammarRecipe. The form has been checked."""
    if wanted.kind != "structural_tag":
        return wanted.json_after
    sent = _tag_of(wanted, wanted.field)
    if "format" in sent:
        return () if sent["format"]["type"] == "json_schema" else None
    # The end of the JSON is known by its last bracket, so that it must be an object or a list.
    begins = [one["begin"] for one in sent["structures"] if _is_container(one, wanted.field)]
    return tuple(begins) or None


def _is_container(structure: Json, field: str) -> bool:
    """Return whether a structure holds an object or a list alone."""
    schema = schema_of(structure.get("schema", ANY_OBJECT), field)
    return isinstance(schema, dict) and schema.get("type") in ("object", "array")


def _place_of(
    wanted: StructuredOutputsParams, source: str, compiler: Compiler, fault: str
) -> tuple[str, str] | None:
    """Where in a schema the fault is, and what it is, as far as that can be found."""

    def fault_of(part: Any) -> str | None:
        return compiler.fault_of(f"start: {_spelled(part, wanted)}")

    found = locate(schemas_of(source), fault, fault_of)
    return None if found is None else (f": {found[0]}", found[1])


def schema_of(value: Any, field: str, strict: bool = True) -> Any:
    """A JSON schema that was sent as an object or as text, bounded and checked. strict: keywords
    that are not supported are refused, not left out."""
    schema = value
    if isinstance(value, str):
        schema = _from_json(value, field)
    _check_size(schema, field)
    schema = without_void(schema) if strict else without_refused(without_void(schema))
    check_keywords(schema, field)
    found = canonical(schema)
    if found != schema:
        _check_size(found, field)
        check_keywords(found, field)
    return found


def _check_size(value: Any, field: str) -> None:
    check_depth(value, field)
    if len(_to_json(value, field)) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{field} has more than {MAX_GRAMMAR_CHARACTERS} characters, the maximum. Shorten it.",
            field,
        )


def _from_json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{field} is not valid JSON ({brief(str(error))}); allowed: an object, or JSON text of "
            "one. Correct the JSON at that position.",
            field,
        ) from None


def _to_json(value: Any, field: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"{field} cannot be written as JSON: {brief(str(error))}. Use only objects, lists, "
            "texts, finite numbers, booleans and null.",
            field,
        ) from None


def json_form(wanted: StructuredOutputsParams) -> str | None:
    """The JSON that an answer must be, as an expression of a grammar; None where it is no JSON.
    Raises RequestError."""
    if wanted.kind == "json_object":
        return _spelled(ANY_OBJECT, wanted)
    if wanted.kind != "json":
        return None
    schema = schema_of(wanted.json, wanted.field)
    return _spelled(closed(schema) if wanted.disable_additional_properties else schema, wanted)


def _spelled(schema: Any, wanted: StructuredOutputsParams) -> str:
    options: Json = {"whitespace_flexible": not wanted.disable_any_whitespace}
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    options["json_allowed_escapes"] = escapes_of(schema)
    spelled = with_bounded_integers(schema) if isinstance(schema, dict) else {"allOf": [schema]}
    return "%json " + json.dumps({**spelled, "x-guidance": options})


def _json_source(wanted: StructuredOutputsParams, field: str) -> str:
    return f"start: {json_form(wanted)}"


def _regex(wanted: StructuredOutputsParams, field: str) -> str:
    return f"start: /{regex_to_lark(str(wanted.regex), use_ascii='')}/"


def _choice(wanted: StructuredOutputsParams, field: str) -> str:
    lines = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice or ())
    return f"start: {lines}"


def _grammar(wanted: StructuredOutputsParams, field: str) -> str:
    try:
        source = any_to_lark(str(wanted.grammar))
    except Exception as error:  # what the converter of GBNF raises is Exception itself
        raise RequestError(
            f"{field} cannot be parsed: {first_line(str(error))}; allowed: Lark or GBNF. Correct "
            "the grammar at that position.",
            field,
        ) from None
    check_lark(source, field)
    if wanted.written:
        check_operators(source, field)
    return source


def check_lark(source: str, field: str) -> None:
    """Raise RequestError for a grammar of too many rules, or of rules that drafts would change."""
    attribute = ATTRIBUTE.search(LITERAL.sub("", source))
    if attribute is not None:
        raise RequestError(
            f"{field}: the attribute {attribute[1]!r} of a rule is not supported: what it allows "
            "would depend on drafts. Leave it out.",
            field,
        )
    rules = sum(1 for _ in RULE.finditer(source))
    if rules > MOST_RULES:
        raise RequestError(
            f"{field} has {rules} rules; allowed: at most {MOST_RULES}. Write fewer, longer ones.",
            field,
        )


def _tag_of(wanted: StructuredOutputsParams, field: str) -> Any:
    """Return the structures and triggers of a structural tag, or its format of fixed parts."""
    tag = wanted.structural_tag
    sent = _from_json(tag, field) if isinstance(tag, str) else tag
    _check_size(sent, field)
    if isinstance(sent, dict) and "format" in sent:
        form = sent["format"]
        fixed = isinstance(form, dict) and form.get("type") in _FORMS
        return {"format": form} if fixed else _of_triggered(form, field)
    return sent


def _structural_tag(wanted: StructuredOutputsParams, field: str) -> str:
    sent = _tag_of(wanted, field)
    if isinstance(sent, dict) and "format" in sent:
        rules = Rules({})
        return rules.source(_form(sent["format"], rules, field))
    structures = sent.get("structures") if isinstance(sent, dict) else None
    triggers = sent.get("triggers") if isinstance(sent, dict) else None
    if not _are_structures(structures) or not _are_texts(triggers):
        raise RequestError(
            f"{field}={brief(sent)} is not supported; allowed: an object of structures (begin, "
            "schema and end of each) and triggers (texts), or of format. Send one of them.",
            field,
        )
    assert structures is not None and triggers is not None
    return tags([_tag(one, triggers, field) for one in structures])


def _form(form: Any, rules: Rules, field: str) -> str:
    """Return a format of fixed parts as an expression of a grammar; its depth is bounded."""
    make = _FORMS.get(str(form.get("type"))) if isinstance(form, dict) else None
    if make is None:
        kind = form.get("type") if isinstance(form, dict) else form
        raise RequestError(
            f"{field}: the format {brief(kind)} is not supported there; allowed: "
            f"{', '.join(_FORMS)}, and 'triggered_tags' alone. Use one of them.",
            field,
        )
    _check_fields(form, form["type"], field)
    found = make(form, rules, field)
    if found is None or len(rules) > MOST_RULES - 1:
        raise RequestError(
            f"{field}: the format {brief(form)} lacks fields, or the tag has more than "
            f"{MOST_RULES} parts. Add the fields, or send fewer parts.",
            field,
        )
    return rules.rule(found)


def _check_fields(form: Json, kind: str, field: str) -> None:
    """Raise RequestError for a field of a format that would be dropped and asks for something."""
    allowed = FORM_FIELDS[kind]
    for name, value in form.items():
        if name not in allowed and value not in (None, False, [], UNCHANGED.get(name)):
            raise RequestError(
                f"{field}: {brief(name)[1:-1]}={brief(value)} of the format {kind!r} is not "
                f"supported; allowed: {', '.join(allowed)}. Leave it out.",
                field,
            )


def _json_form(form: Json, rules: Rules, field: str) -> str | None:
    if "json_schema" not in form:
        return None
    schema = schema_of(form["json_schema"], field)
    return _spelled(schema, StructuredOutputsParams(json_object=True))


def _text_form(form: Json, rules: Rules, field: str) -> str | None:
    value = form.get("value")
    return literal(value) if isinstance(value, str) and value else None


def _regex_form(form: Json, rules: Rules, field: str) -> str | None:
    pattern = form.get("pattern")
    if not isinstance(pattern, str) or len(pattern) > MAX_REGEX_CHARACTERS:
        return None
    return rules.terminal(f"/{regex_to_lark(pattern, use_ascii='')}/")


def _tag_form(form: Json, rules: Rules, field: str) -> str | None:
    begin, end = form.get("begin"), form.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        return None
    return sequence(
        literal(begin) if begin else "",
        _form(form.get("content"), rules, field),
        literal(end) if end else "",
    )


def _parts_of_form(form: Json, rules: Rules, field: str) -> list[str]:
    elements = form.get("elements")
    if not isinstance(elements, list) or len(elements) > MOST_STRUCTURES:
        return []
    return [_form(one, rules, field) for one in elements]


def _sequence_form(form: Json, rules: Rules, field: str) -> str | None:
    return sequence(*_parts_of_form(form, rules, field)) or None


def _or_form(form: Json, rules: Rules, field: str) -> str | None:
    parts = _parts_of_form(form, rules, field)
    return either(parts) if parts else None


_FORMS: dict[str, Callable[[Json, Rules, str], str | None]] = {
    "json_schema": _json_form,
    "const_string": _text_form,
    "regex": _regex_form,
    "tag": _tag_form,
    "sequence": _sequence_form,
    "or": _or_form,
}
"""Formats of structural tags that have no free text -> what makes an expression of one."""


def _of_triggered(form: Any, field: str) -> Json:
    """Structures and triggers of a `format`, as xgrammar writes structural tags now."""
    kind = form.get("type") if isinstance(form, dict) else None
    tags = form.get("tags") if isinstance(form, dict) else None
    bound = [name for name in UNHELD if isinstance(form, dict) and form.get(name)]
    if kind != "triggered_tags" or bound or not _are_tags(tags):
        raise RequestError(
            f"{field}: the format {brief(kind)} is not supported as sent ({brief(form)}); allowed: "
            "'triggered_tags' whose tags have a json_schema as content, without "
            f"{', '.join(UNHELD)}; or {', '.join(_FORMS)}. Use one of them.",
            field,
        )
    assert tags is not None
    _check_fields(form, "triggered_tags", field)
    for one in tags:
        _check_fields(one, "tag", field)
        _check_fields(one["content"], "json_schema", field)
    structures = [
        {"begin": tag.get("begin"), "schema": tag["content"]["json_schema"], "end": tag.get("end")}
        for tag in tags
    ]
    return {"structures": structures, "triggers": form.get("triggers")}


def _are_tags(value: Any) -> bool:
    """Whether these are tags around JSON."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_STRUCTURES:
        return False
    contents = [one.get("content") if isinstance(one, dict) else None for one in value]
    return all(
        isinstance(one, dict) and one.get("type") == "json_schema" and "json_schema" in one
        for one in contents
    )


def _are_structures(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_STRUCTURES:
        return False
    for one in value:
        if not isinstance(one, dict) or not {"begin", "end"} <= one.keys():
            return False
        if not isinstance(one["begin"], str) or not isinstance(one["end"], str):
            return False
    return True


def _are_texts(value: Any) -> bool:
    sized = isinstance(value, list) and 1 <= len(value) <= MOST_STRUCTURES
    return sized and all(isinstance(text, str) and text for text in value)


def _tag(one: Json, triggers: Sequence[str], field: str) -> StructTag:
    """A structure under the first trigger that its beginning starts with."""
    begin = one["begin"]
    trigger = next((text for text in triggers if begin.startswith(text)), None)
    if trigger is None:
        raise RequestError(
            f"{field}: the structure that begins with {brief(begin)} starts with no trigger; "
            "allowed: beginnings that start with one. Add a trigger.",
            field,
        )
    schema = schema_of(one.get("schema", ANY_OBJECT), field)
    spelled = with_bounded_integers(schema) if isinstance(schema, dict) else {"allOf": [schema]}
    spelled = {**spelled, "x-guidance": {"json_allowed_escapes": escapes_of(schema)}}
    return StructTag(trigger=trigger, begin=begin, grammar=json.dumps(spelled), end=one["end"])


def tags(structures: list[StructTag]) -> str:
    """Free text in which each structure's trigger begins one of those with that trigger."""
    return StructTag.to_grammar(structures, assume_special=False)


_SOURCES: dict[str, Callable[[StructuredOutputsParams, str], str]] = {
    "json": _json_source,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_source,
    "structural_tag": _structural_tag,
}
