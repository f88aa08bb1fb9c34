"""The table of published checkpoints in docs/models.md: what Lockstep makes of their settings.

python docs/published.py      # writes it into the page; tests/test_docs.py finds a stale one
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import LockstepError
from tests.models.published_checkpoints import (
    CHECKPOINTS,
    LOADS,
    Published,
    names_known,
    read_checkpoint_settings,
)

PAGE = Path(__file__).parent / "models.md"
BEGIN = "<!-- published: made by docs/published.py -->\n"
END = "<!-- /published -->\n"
REASON = re.compile(r"(?:\S*config\.json )?(.*?) is not allowed")
"""The setting and its value, in the message of an error."""


def table() -> Iterator[str]:
    """Yield the lines of the table: what loads, then what is refused."""
    yield "| checkpoint | architecture | weights | result |"
    yield "|---|---|---|---|"
    rows = [(one, *_outcome(one)) for one in CHECKPOINTS.values()]
    for one, weights, result in sorted(rows, key=lambda row: not row[2].startswith(LOADS)):
        names = one.config.get("architectures", ["not in the source"])
        shown = f"{result}, all tensors" if result == LOADS and names_known(one) else result
        yield f"| {one.checkpoint} | {names[0]} | {weights} | {shown} |"


def _outcome(one: Published) -> tuple[str, str]:
    """Return the weight format of a checkpoint, and whether it loads or why it is refused."""
    settings = one.text.get("quantization_config") or one.config.get("quantization_config") or {}
    plain = one.text.get("dtype") or one.text.get("torch_dtype") or one.config.get("dtype")
    method = settings.get("quant_method", plain or "not in the source")
    try:
        packing = read_checkpoint_settings(one)
    except LockstepError as error:
        reason = REASON.match(str(error))
        assert reason is not None, error
        return method, f"refused: `{reason[1]}`"
    on_gpu = f" on a CPU; a GPU refuses: {one.refused_on_gpu}" if one.refused_on_gpu else ""
    return packing.name if packing else method, LOADS + on_gpu


def page() -> str:
    """Return docs/models.md with the table as it must be."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + "\n".join(table()) + "\n" + text[end:]


if __name__ == "__main__":
    if PAGE.read_text() != page():
        PAGE.write_text(page())
        sys.stdout.write(f"{PAGE.name} is new\n")
