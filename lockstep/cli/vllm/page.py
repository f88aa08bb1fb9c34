"""docs/vllm_flags.md, made from the table."""

import sys
from collections.abc import Iterator
from itertools import groupby

from lockstep.flags.flag import Flag, Form, Kind
from lockstep.flags.table import GROUPS

HEAD = """# The flags of vllm serve

Made by `lockstep vllm-flags` from the table that the command line is read by
([flags/table.py](../lockstep/flags/table.py)). A command line of `vllm serve` works with
`lockstep serve` in its place: every flag is one of these.

- **acts**: it has a meaning here; a wrong value is an error that names the allowed ones.
- **noted**: it tunes another engine. It is read, and a line says what Lockstep does instead.
- **refused**: it would change answers, or promises what is not there. An error names the remedy.

Values that ask for what is done anyway are taken in silence, whatever the flag is. Underscores are
read like dashes, `--flag=value` like `--flag value`; `--no-flag` turns a switch off. Sizes may be
`8k` (8,000) or `8K` (8,192), and those of memory `24G`, `24GiB`, `24GB` or
`25.3e9`. A flag that takes JSON takes a key as well:
`-cc.cudagraph_mode=NONE`. `--config file.yaml` holds flags by their names without dashes, such as
`max-model-len: 8192`, in at most 65,536 characters of plain values, without aliases and tags; the
command line has the last word. A misspelt flag is an error that names the nearest. All commands
that load a model know the flags whose settings they have.

Defaults that differ: `--host` is 127.0.0.1; `--max-num-seqs` is chosen from a GPU's
memory, 256 where it fits, and is 16 on a CPU; `--max-num-batched-tokens` is 2,048, or fewer where
memory is short ([how](models.md#how-memory-is-planned)); a checkpoint's own draft module drafts
unless `--speculative-config none` is given; with a key (`--api-key`), all but `/health`, `/ping`
and the playground's page ask for it, `/metrics` too.
"""


def vllm_flags() -> None:
    """Print the page of vLLM's flags, docs/vllm_flags.md."""
    sys.stdout.write(page())


def page() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    for group, flags in GROUPS.items():
        lines += [f"## {group}\n", "| flag | here | |", "|---|---|---|"]
        for flag in flags:
            lines += _lines(flag)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _lines(flag: Flag) -> Iterator[str]:
    """A flag, and its keys below it: those of which the same is to be said in one line."""
    yield _line(flag, [f"--{flag.name}", *flag.short])
    for _, alike in groupby(flag.keys, lambda key: (key.kind, _about(key))):
        keys = list(alike)
        yield _line(keys[0], [f"--{flag.name}.{keys[0].name}", *(f".{k.name}" for k in keys[1:])])


def _line(flag: Flag, names: list[str]) -> str:
    cells = [", ".join(f"`{name}`" for name in names), flag.kind.value, _about(flag)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _about(flag: Flag) -> str:
    """What comes of it, the setting where that has another name, and the values."""
    parts = [flag.says.removesuffix(".")]
    if flag.setting.replace("_", "-") not in ("", flag.name.replace("_", "-")):
        parts.append(f"sets `{flag.setting}`")
    if flag.kind is Kind.REFUSED and flag.same and flag.form is not Form.SWITCH:
        parts.append(
            "these change nothing: "
            + ", ".join(f"`{value}`" if value else "an empty text" for value in flag.values)
        )
    elif flag.kind is not Kind.REFUSED and flag.allowed:
        parts.append("values: " + ", ".join(f"`{value}`" for value in flag.values))
    elif flag.means and flag.form is not Form.SWITCH:
        meant = (f"`{value}` is {_shown(to)}" for value, to in flag.means.items())
        parts.append(", ".join(meant))
    return "; ".join(part for part in parts if part)


def _shown(value: object) -> str:
    return "as if left out" if value is None else f"`{value}`"
