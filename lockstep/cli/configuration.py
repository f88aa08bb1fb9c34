"""lockstep configuration: the page of all settings, docs/configuration.md, as they are declared."""

import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields

from lockstep.config import EngineConfig
from lockstep.serve.settings import ServerSettings
from lockstep.settings import Settings, adapters, allowed_by, describe
from lockstep.spec.config import EXAMPLE, SpeculativeConfig
from lockstep.text.settings import TextSettings

HEAD = """# Configuration

Made by `lockstep configuration` from the declarations of the settings, which check them too. A
setting is an argument of `LLM(...)` and `EngineConfig.read(...)`, and an option of every command:
`max_num_seqs` is `--max-num-seqs`, a switch is `--enable-prefix-caching` or
`--no-enable-prefix-caching`. An unknown name is an error, and so is a value that is not allowed:
the error says what is. There are no environment variables.

`speculative_config` is `"auto"` where `LLM(...)`, `AsyncLLM(...)` and commands leave it out: the
draft module that comes with the checkpoint, with 3 drafts, or none. `EngineConfig`, which they
make, holds what that has come to. `None`, on the command line `none`, is no drafts; a draft changes
no answer. On the command line `row_buckets` is `1,2,4,8` and a dict is JSON.
[vllm_flags.md](vllm_flags.md) has the flags of `vllm serve` that are read besides.
"""
SERVING = """
## lockstep serve

Options of the server alone, e.g. `--max-body-size`; [serving.md](serving.md) says what for.
"""
TEXT = """
## Text

Arguments of `LLM(...)` as well, and options of `serve`, `chat` and `generate`.
"""
DRAFTING = f"""
## speculative_config

A dict, e.g. `{EXAMPLE}`, in vLLM's keys. These are keys of every method:
"""


def configuration() -> None:
    """Print the page of all settings, docs/configuration.md."""
    sys.stdout.write(page())


def page() -> str:
    """The page as Markdown."""
    from lockstep.spec import DRAFTERS, drafter_module

    lines = [HEAD, *_table(EngineConfig, ()), DRAFTING, *_table(SpeculativeConfig, ())]
    common = [one.name for one in fields(SpeculativeConfig)]
    for method in DRAFTERS:
        options = drafter_module(method).Options
        if len(fields(options)) > len(common):
            lines += [f"\nMethod `{method}` has these as well:\n", *_table(options, common)]
    lines += [TEXT, *_table(TextSettings, ())]
    lines += [SERVING, *_table(ServerSettings, ())]
    return "\n".join(lines) + "\n"


def _table(settings: type[Settings], leave: list[str] | tuple[str, ...]) -> Iterator[str]:
    """A line per setting but those to leave out."""
    yield "| setting | default | allowed | what it is |"
    yield "|---|---|---|---|"
    for one in fields(settings):
        if one.name not in leave:
            cells = (f"`{one.name}`", _default(one), _allowed(settings, one), one.metadata["help"])
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(one: Field[object]) -> str:
    return "must be given" if one.default is MISSING else f"`{one.default!r}`"


def _allowed(settings: type[Settings], one: Field[object]) -> str:
    """In words, as an error has it."""
    return allowed_by(one) or describe(adapters(settings)[one.name].json_schema())
