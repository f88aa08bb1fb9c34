"""Reader of the file of --config: one YAML mapping of plain values.

Aliases and tags are refused. Nested aliases can expand to more than the memory, or contain
themselves, and tags can construct objects.
"""

from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, brief
from lockstep.settings import path_fault, read_text_file

if TYPE_CHECKING:
    import yaml

MAX_CHARACTERS = 1 << 16
"""Maximum characters of the file; PyYAML reads about 20,000 values per second."""
PLAIN_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")
"""YAML types that JSON also has; values of other types, such as dates, stay text."""
REMEDY = "Name a YAML file with one flag per line, e.g. max-model-len: 8192."


def read_config(path: str) -> dict[Any, Any]:
    """Return the mapping of a file with JSON values. Raises ConfigError."""
    import yaml

    try:
        text = read_text_file(path, MAX_CHARACTERS)
        mapping = _plain_loader()(text).get_single_data()
        if not isinstance(mapping, dict):
            raise ValueError("it has no mapping")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(path_fault(error).split())
        raise ConfigError(f"--config={brief(path)} cannot be read: {reason}. {REMEDY}") from None
    return mapping


def _plain_loader() -> "type[yaml.SafeLoader]":
    """Return a loader class for PLAIN_TYPES without aliases."""
    import yaml

    plain_tags = [f"tag:yaml.org,2002:{name}" for name in PLAIN_TYPES]

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [resolver for resolver in resolvers if resolver[0] in plain_tags]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        yaml_constructors = {
            tag: constructor
            for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
            if tag in (*plain_tags, None)
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Return the next node. Raises ValueError for an alias."""
            if self.check_event(yaml.AliasEvent):
                line = self.peek_event().start_mark.line + 1
                raise ValueError(f"line {line} has an alias; write out its value")
            return super().compose_node(parent, index)

    return Loader
