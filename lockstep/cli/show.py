"""What the commands share on the screen. Answers go to stdout, progress and notes to stderr."""

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lockstep.progress import progress_bar

if TYPE_CHECKING:
    from lockstep.config import EngineConfig
    from lockstep.llm import LLM
    from lockstep.worker.executor import Facts


def notes() -> Console:
    """Where progress and notes are written."""
    return Console(stderr=True, highlight=False)


def note(text: str, style: str = "dim") -> None:
    """One line on stderr, as it is."""
    notes().print(text, style=style, markup=False, soft_wrap=True)


BUNDLED = "the bundled model"
"""What a model is called where the user names none."""


def load(settings: dict[str, Any], quiet: bool = False) -> "LLM":
    """The LLM of a command's settings, with a progress bar and one line about what came of them."""
    from lockstep.llm import LLM

    if quiet:
        return LLM(**settings)
    with progress_bar() as show:
        llm = LLM(progress=show, **settings)
    show_start(llm.engine.facts)
    return llm


def show_start(facts: "Facts") -> None:
    """Print what an engine is, and what was chosen for the user."""
    for line in (summary(facts), *facts.plan.memory_notes):
        note(line)


def summary(facts: "Facts") -> str:
    """Model, drafting, memory and numerics of an engine, in one line."""
    plan = facts.plan
    spec = facts.config.speculative_config
    drafting = f"{spec.method} K={spec.num_speculative_tokens}" if spec else "no drafts"
    if spec and spec.synthetic_length:
        drafting += (
            f" with synthetic acceptance {spec.synthetic_acceptance:g} a position "
            f"(acceptance length {spec.synthetic_length:.2f})"
        )
    memory = plan.num_pages * plan.page_bytes + plan.num_slots * plan.slot_bytes
    room = (plan.num_pages - 1) * plan.page_size
    loaded = facts.loaded
    read = "random weights"
    if loaded:
        read = f"{loaded.bytes / 1e9:.2f} GB of weights at {loaded.speed / 1e9:.1f} GB/s"
    return (
        f"{model_name(facts.config)} on {plan.device}, {drafting}, max_num_seqs "
        f"{plan.max_num_seqs}, cache of {room:,} tokens "
        f"({memory / 2**20:,.0f} MiB), {read}, graph {plan.graph_mode}, "
        f"numerics {plan.numerics}"
    )


def model_name(config: "EngineConfig") -> str:
    """What the user called the model."""
    return config.model or BUNDLED


def print_result(value: Any, asked: bool) -> None:
    """print_json for programs: where it is asked for, and where stdout is no terminal."""
    if asked or not sys.stdout.isatty():
        print_json(value)


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Text on stdout as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
