"""The file of --config: one YAML mapping of plain values.

What a few lines could blow up is not read: aliases, which may stand for more than memory holds or
for what they stand in, and tags, which make objects.
"""

from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, brief
from lockstep.settings import read_named, why_unread

if TYPE_CHECKING:
    import yaml

MOST_CHARACTERS = 1 << 16
"""Of the file: PyYAML reads some 20,000 values in a second."""
PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
"""YAML's types that JSON has too. Others, such as dates, are text."""
REMEDY = "Name a YAML file with a flag a line, e.g. max-model-len: 8192."


def read_config(path: str) -> dict[Any, Any]:
    """The mapping of a file, values as JSON has them. Raises ConfigError."""
    import yaml

    try:
        text = read_named(path, MOST_CHARACTERS)
        found = _plain_loader()(text).get_single_data()
        if not isinstance(found, dict):
            raise ValueError("it holds no mapping")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(why_unread(error).split())
        raise ConfigError(f"--config={brief(path)} cannot be read: {reason}. {REMEDY}") from None
    return found


def _plain_loader() -> "type[yaml.SafeLoader]":
    """A loader of PLAIN that knows no aliases; texts that look like other types stay texts."""
    import yaml

    plain = [f"tag:yaml.org,2002:{name}" for name in PLAIN]

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [one for one in known if one[0] in plain]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        yaml_constructors = {
            tag: made
            for tag, made in yaml.SafeLoader.yaml_constructors.items()
            if tag in (*plain, None)
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            """The next node. Raises ValueError for an alias."""
            if self.check_event(yaml.AliasEvent):
                line = self.peek_event().start_mark.line + 1
                raise ValueError(f"line {line} has an alias; write out its value")
            return super().compose_node(parent, index)

    return Loader
