"""Drafters. One file and one table line each; no drafter can change an answer.

A drafter's file has
    Options                     SpeculativeConfig, with the method's own keys if it has any
    create(context) -> Drafter  the drafter itself
    NEEDS_MODULE                whether it drafts with a module; then it has these as well:
    refusal(checkpoint) -> str | None
                                why it cannot draft for this checkpoint, or None
    build(options, checkpoint, target, build) -> DraftModule
                                the module, whose weights are not loaded yet
    passes(rows, tokens, num_drafts) -> tuple[int, ...]
                                the tokens of each of its passes over the module's weights, in a
                                step of `rows` rows and `tokens` tokens that makes as many drafts
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, choice_error
from lockstep.settings import check_names
from lockstep.spec.config import EXAMPLE, SpeculativeConfig

if TYPE_CHECKING:
    from lockstep.models.checkpoint import Checkpoint

DRAFTERS = {
    "ngram": "lockstep.spec.ngram",
    "suffix": "lockstep.spec.suffix",
    "mtp": "lockstep.spec.mtp",
    "eagle3": "lockstep.spec.eagle3",
    "draft_model": "lockstep.spec.draft_model",
    "dflash": "lockstep.spec.dflash",
    "prediction": "lockstep.spec.prediction",
}
OLDER_NAMES = {
    "deepseek_mtp": "mtp",
    "nemotron_h_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
"""vLLM's names of one family's draft module -> the method that drafts with it."""


def drafter_module(method: str) -> ModuleType:
    """The module that makes this drafter. Raises ConfigError on an unknown method."""
    if method not in DRAFTERS:
        raise choice_error(
            ConfigError,
            "speculative_config method",
            method,
            ", ".join(DRAFTERS),
            "Choose one of them.",
        )
    return import_module(DRAFTERS[method])


def read(value: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
    """Return the Options of a method, from vLLM's dict.

    Raises ConfigError on a missing or unknown method, and on a key that the method does not have.
    """
    if value is None:
        return None
    if isinstance(value, SpeculativeConfig):
        value = asdict(value)
    if not isinstance(value, dict):
        allowed = f"None or a dict, e.g. {EXAMPLE}"
        raise choice_error(ConfigError, "speculative_config", value, allowed, "Write it as a dict.")
    value = with_method(value)
    method = value["method"]
    options = drafter_module(method).Options
    remedy = f"Remove or rename the key: method={method!r} has these."
    check_names(options, value, "speculative_config key", remedy)
    return options(**value)


def with_method(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a speculative_config with the name that its method has here.

    vLLM has older names, and a model without a method is a draft model. Raises ConfigError where it
    has neither.
    """
    if "method" not in value and "model" in value:
        value = {"method": "draft_model", **value}
    if "method" not in value:
        raise ConfigError('speculative_config has no "method"; name a drafter, e.g. "mtp".')
    method = SpeculativeConfig(value["method"]).method
    return {**value, "method": OLDER_NAMES.get(method, method)}


def refusals(checkpoint: "Checkpoint") -> dict[str, str | None]:
    """Return method -> why it cannot draft for this checkpoint; None where it can."""
    reasons: dict[str, str | None] = {}
    for name in DRAFTERS:
        module = drafter_module(name)
        reasons[name] = module.refusal(checkpoint) if module.NEEDS_MODULE else None
    return reasons


Passes = Callable[[int, int, int], tuple[int, ...]]
"""Type of `passes` in a drafter's file."""


def no_passes(rows: int, tokens: int, num_drafts: int) -> tuple[int, ...]:
    """Return the passes of a step that drafts without a module: none."""
    return ()


def passes_of(options: SpeculativeConfig | None) -> Passes:
    """Return the `passes` of a method's module."""
    module = None if options is None else drafter_module(options.method)
    return module.passes if module is not None and module.NEEDS_MODULE else no_passes


def own_drafter(checkpoint: "Checkpoint") -> str | None:
    """The method whose draft module comes with this checkpoint, if any."""
    allowed = (name for name, why in refusals(checkpoint).items() if why is None)
    return next((name for name in allowed if drafter_module(name).NEEDS_MODULE), None)
