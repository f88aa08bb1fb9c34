"""Reading of a checkpoint's chat templates: one or several, in their own files or in config
files."""

from pathlib import Path
from typing import Any

from lockstep.errors import brief
from lockstep.text.model_files import damaged, is_text, read_json, read_text

DEFAULT = "default"
TOOL_USE = "tool_use"
"""Name of the template for requests with tools."""
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
MAX_TEMPLATES = 32
CONFIG_FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
"""JSON files that may have chat_template; the first one that has it is used. The second and third
belong to processors of older multimodal checkpoints."""


def read_templates(folder: Path) -> tuple[dict[str, str], Path]:
    """Return (templates by name, file for error messages); {} if there is none.

    Template files take precedence over chat_template of a JSON file, as in transformers.

    Raises: CheckpointError if a file cannot be read or a template is not a string.
    """
    templates = {}
    path = folder / TEMPLATE_FILE
    if path.is_file():
        templates[DEFAULT] = read_text(path)
    extra = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    if len(extra) > MAX_TEMPLATES:
        allowed = f"at most {MAX_TEMPLATES} templates"
        raise damaged(folder / TEMPLATE_FOLDER, f"{len(extra)} templates; allowed: {allowed}")
    templates |= {file.stem: read_text(file) for file in extra}
    if templates:
        return templates, path if path.is_file() else folder / TEMPLATE_FOLDER
    for name in CONFIG_FILES:
        path = folder / name
        templates = _by_name(read_json(path).get("chat_template"), path)
        if templates:
            return templates, path
    return {}, folder / CONFIG_FILES[0]


def _by_name(value: Any, path: Path) -> dict[str, str]:
    """Return the templates of a JSON file's chat_template by name."""
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in value[: MAX_TEMPLATES + 1]]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    elif not isinstance(value, dict):
        value = {DEFAULT: value}
    is_valid = all(is_text(name) and is_text(template) for name, template in value.items())
    if not is_valid or len(value) > MAX_TEMPLATES:
        allowed = f"a text, or at most {MAX_TEMPLATES} objects with a name and a template"
        raise damaged(path, f"chat_template={brief(value)}; allowed: {allowed}")
    return value
