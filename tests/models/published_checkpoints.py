"""Facts of published checkpoints: settings of their config.json, and their tensors without values.

Each file of the folder `published` is one checkpoint: its name, where the facts are from, what was
filled in, what Lockstep makes of it, and the contents of its JSON files. Long lists are written
short: {"repeat": [...], "times": n} in a list stands for n copies, and braces in a name for
several names, as a shell expands them: `layers.{0-2,5}.{q_proj,k_proj}`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "published"
LOADS = "loads"
BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Published:
    """A published checkpoint.

    result: LOADS, or a part of the error that refuses it; drafter: of a draft model, the method and
    the name of its target; files: name of a JSON file -> its content; shapes: name of a tensor ->
    its dtype and shape ("BF16 [4096, 128]"), None where only the name is known.
    """

    checkpoint: str
    source: str
    filled_in: tuple[str, ...]
    result: str
    drafter: dict[str, str] | None
    files: dict[str, dict[str, Any]]
    written_shapes: dict[str, str | None]

    @classmethod
    def read(cls, path: Path) -> "Published":
        """Read a file of the folder."""
        raw = json.loads(path.read_text())
        return cls(
            raw.pop("checkpoint"),
            raw.pop("source"),
            tuple(raw.pop("filled_in", ())),
            raw.pop("result"),
            raw.pop("drafter", None),
            written_shapes=raw.pop("tensors", {}),
            files=expanded(raw),
        )

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return self.files["config.json"]

    @property
    def text(self) -> dict[str, Any]:
        """The settings of its text model."""
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    @cached_property
    def shapes(self) -> dict[str, str | None]:
        """Every tensor by its name; none where its names are not known."""
        return {
            name: shape for short, shape in self.written_shapes.items() for name in names_of(short)
        }

    def write(self, folder: Path) -> Path:
        """Write its JSON files to a folder, and return that."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return folder


def expanded(value: Any) -> Any:
    """Return a value of a file with its lists and names written out."""
    if isinstance(value, dict):
        return {name: expanded(inner) for key, inner in value.items() for name in names_of(key)}
    if not isinstance(value, list):
        return value
    written: list[Any] = []
    for one in value:
        if isinstance(one, dict) and set(one) == {"repeat", "times"}:
            written += expanded(one["repeat"]) * one["times"]
        elif isinstance(one, str):
            written += names_of(one)
        else:
            written.append(expanded(one))
    return written


def names_of(short: str) -> list[str]:
    """Return the names that a name with braces stands for."""
    found = BRACES.search(short)
    if found is None:
        return [short]
    before, after = short[: found.start()], short[found.end() :]
    return [name for one in _alternatives(found[1]) for name in names_of(before + one + after)]


def _alternatives(text: str) -> Iterator[str]:
    """Yield what stands between braces: words, and the numbers of ranges."""
    for part in text.split(","):
        span = RANGE.fullmatch(part)
        yield from map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part]


CHECKPOINTS = {one.checkpoint: one for one in map(Published.read, sorted(FOLDER.glob("*.json")))}
"""Every published checkpoint, by its name."""
