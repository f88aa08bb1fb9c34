"""Output of commands: results go to stdout, progress and notes to stderr."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lockstep.progress import progress_bar

if TYPE_CHECKING:
    from lockstep.config import EngineConfig
    from lockstep.llm import LLM
    from lockstep.worker.executor import Facts


def notes() -> Console:
    """Return the console for progress and notes."""
    return Console(stderr=True, highlight=False)


def note(text: str, style: str = "dim") -> None:
    """Print one line to stderr unchanged."""
    notes().print(text, style=style, markup=False, soft_wrap=True)


BUNDLED = "the bundled model"
"""Name of the model if the user names none."""


class _Once(logging.Filter):
    """Filter that lets each message pass once."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._messages
        self._messages.add(message)
        return is_new


@contextmanager
def warnings_once() -> Iterator[None]:
    """Show each warning once, for commands that build many engines of one model.

    Warnings of a program without logging handlers go to logging.lastResort.
    """
    handler = logging.lastResort
    once = _Once()
    if handler is not None:
        handler.addFilter(once)
    try:
        yield
    finally:
        if handler is not None:
            handler.removeFilter(once)


def load(settings: dict[str, Any], quiet: bool = False) -> "LLM":
    """Create the LLM of a command's settings, with a progress bar and one summary line."""
    from lockstep.llm import LLM

    if quiet:
        return LLM(**settings)
    with progress_bar() as show:
        llm = LLM(progress=show, **settings)
    show_start(llm.engine.facts)
    return llm


def show_start(facts: "Facts") -> None:
    """Print the summary of an engine, notes on its memory plan, and replaced backends."""
    for line in (summary(facts), *facts.plan.memory_notes):
        note(line)
    for replacement in facts.replacements:
        note(f"{replacement}.", "yellow")


def summary(facts: "Facts") -> str:
    """Return one line with the engine's model, drafter, memory and numerics."""
    plan = facts.plan
    spec = facts.config.speculative_config
    drafting = f"{spec.method} K={spec.num_speculative_tokens}" if spec else "no drafts"
    if spec and spec.synthetic_length:
        drafting += (
            f" with synthetic acceptance {spec.synthetic_acceptance:g} a position "
            f"(acceptance length {spec.synthetic_length:.2f})"
        )
    memory = plan.num_pages * plan.page_bytes + plan.num_slots * plan.slot_bytes
    num_tokens = (plan.num_pages - 1) * plan.page_size
    loaded = facts.loaded
    loaded_text = "random weights"
    if loaded:
        loaded_text = f"{loaded.bytes / 1e9:.2f} GB of weights at {loaded.speed / 1e9:.1f} GB/s"
    return (
        f"{model_name(facts.config)} on {plan.device}{_ranks(facts.config)}, {drafting}, "
        f"max_num_seqs {plan.max_num_seqs}, KV cache of {num_tokens:,} tokens "
        f"({memory / 2**20:,.0f} MiB), {loaded_text}, graph {plan.graph_mode}, "
        f"numerics {plan.numerics}"
    )


def _ranks(config: "EngineConfig") -> str:
    """Return the number of ranks and nodes, in words; empty for one rank."""
    ranks = config.tensor_parallel_size
    nodes = config.nnodes
    if ranks == 1:
        return ""
    return f", {ranks} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")


def model_name(config: "EngineConfig") -> str:
    """Return the name of the model as the user gave it."""
    return config.model or BUNDLED


def print_result(value: Any, requested: bool) -> None:
    """Print JSON if requested or if stdout is not a terminal."""
    if requested or not sys.stdout.isatty():
        print_json(value)


def print_json(value: Any) -> None:
    """Print one line of JSON to stdout."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Print text to stdout unchanged, and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()
