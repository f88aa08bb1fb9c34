"""Objects whose propertyNames list names, or have a pattern, as patternProperties.

llguidance knows no propertyNames. Pydantic writes them for a dict whose keys are literals, and Zod
for a record of an enum. Without named properties every property is an additional one, so that
patternProperties with the same schema allow the same objects.
"""

import re
from typing import Any

from lockstep.text.grammars.json_schema import UNSUPPORTED_PATTERN, schemas_in
from lockstep.text.grammars.rewriting import NOTES, rewrite

SPECIAL = re.compile(r"([\\^$.|?*+()\[\]{}])")
"""Characters of a name that a pattern escapes."""
Json = dict[str, Any]


def replace_property_names(schema: Any) -> Any:
    """Return the schema with patternProperties instead of propertyNames, where they are equal."""
    # zod-to-json-schema refers to the place of a schema's first use, which must not move.
    references = [node.get("$ref") for _, node in schemas_in(schema) if isinstance(node, dict)]
    is_referenced = any("/additionalProperties" in str(reference) for reference in references)

    def change(node: Json) -> Json:
        pattern = _pattern_of(node.get("propertyNames"))
        if pattern is None or "properties" in node or "patternProperties" in node or is_referenced:
            return node
        remaining = {key: value for key, value in node.items() if key != "propertyNames"}
        values = {pattern: node.get("additionalProperties", True)}
        return {**remaining, "patternProperties": values, "additionalProperties": False}

    return rewrite(schema, change)


def _pattern_of(names: Any) -> str | None:
    """Return the pattern of the names that a schema allows; None where it has another form."""
    if not isinstance(names, dict):
        return None
    form = {key: value for key, value in names.items() if key not in (*NOTES, "type")}
    if names.get("type", "string") != "string" or len(form) != 1:
        return None
    ((keyword, value),) = form.items()
    if keyword == "pattern" and isinstance(value, str):
        # Tools that are not strict drop propertyNames, but no pattern of patternProperties.
        return None if UNSUPPORTED_PATTERN.search(value) else value
    texts = {"enum": value, "const": [value]}.get(keyword)
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        return None
    escaped = (SPECIAL.sub(r"\\\1", text) for text in texts)
    return f"^({'|'.join(escaped)})$"
