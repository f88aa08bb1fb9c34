"""Keyword arguments of LLM and AsyncLLM: settings by name, and flags of vllm serve."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError, choice_error
from lockstep.flags.flag import Flag, Kind, only_of_server
from lockstep.flags.setter import FlagSetter
from lockstep.flags.table import SERVER_OPTIONS, all_flags
from lockstep.models.checkpoint import Checkpoint
from lockstep.spec import own_drafter
from lockstep.spec.config import AUTO, AUTO_DRAFTS
from lockstep.text.settings import TextSettings
from lockstep.worker.build import find_model

DRAFTING = "speculative_config"
WITHOUT_SERVER = {"disable_log_stats": True, "enable_log_requests": False}
"""Server logging settings -> values that match Python's behaviour: nothing is logged."""
CALL_DEPTH = 7
"""Stack frames between warnings.warn and the line that created an LLM."""


class EngineArgs:
    """Keyword arguments of LLM(...) and AsyncLLM(...), stored for later use.


    AsyncLLM.from_engine_args(EngineArgs(model="...", max_num_seqs=64))
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.model = model
        self.settings = settings

    def read(self) -> tuple[EngineConfig, TextSettings]:
        """Return the settings of the engine and of its text side.

        "auto" drafting is decided by the checkpoint. Raises ConfigError or CheckpointError, before
        a model is loaded.
        """
        settings = dict(self.settings)
        if settings.get("tokenizer") in (None, self.model):
            settings.pop("tokenizer", None)
        values = keyword_values(settings)
        names = [field.name for field in fields(TextSettings) if field.name in values]
        text = TextSettings(**{name: values.pop(name) for name in names})
        chosen = {DRAFTING: AUTO, "hf_overrides": None, **values, "model": self.model}
        return EngineConfig.read(**resolve_auto_drafter(chosen)), text


AsyncEngineArgs = EngineArgs
"""vLLM's name for the keywords of its asynchronous engine."""


def resolve_auto_drafter(settings: dict[str, Any], weights: bool = True) -> dict[str, Any]:
    """Return the settings with "auto" drafting resolved by the checkpoint.

    It becomes the checkpoint's own draft module with AUTO_DRAFTS drafts, or none.
    weights: as in find_model().
    """
    if settings[DRAFTING] != AUTO:
        return settings
    folder = find_model(settings["model"], weights)
    method = own_drafter(Checkpoint.read(folder, settings["hf_overrides"]))
    drafting = {"method": method, "num_speculative_tokens": AUTO_DRAFTS} if method else None
    return {**settings, DRAFTING: drafting}


def keyword_values(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that keyword arguments ask for.

    None counts as left out; for speculative_config it means no drafts. A flag without effect here
    is a warning. Raises ConfigError for a refused flag, a server flag, and an unknown keyword.
    """
    known = [field.name for cls in (EngineConfig, TextSettings) for field in fields(cls)]
    flags = {flag.name.replace("-", "_"): flag for flag in all_flags()}
    setter = FlagSetter((), _warn)
    for name, value in keywords.items():
        flag = flags.get(name)
        if name == DRAFTING and value is None:
            setter.values[name] = None
        elif value is None and (name in known or flag is not None):
            continue
        elif WITHOUT_SERVER.get(name) is value:
            continue
        elif flag is not None and (_applies(flag, known) or flag.no_op):
            applied = flag if _applies(flag, known) else only_of_server(flag)
            _apply(setter, applied, name, value)
        elif name in known:
            setter.values[name] = value
        else:
            raise _unknown(name, known, flags)
    return setter.values


def _applies(flag: Flag, known: list[str]) -> bool:
    """Return whether the flag sets something that Python has, or nothing."""
    return flag.kind is not Kind.ACTS or flag.setting.partition(".")[0] in ("", *known)


def _apply(setter: FlagSetter, flag: Flag, name: str, value: Any) -> None:
    try:
        setter.apply(flag, name, value)
    except ConfigError as error:
        raise ConfigError(_in_python(str(error))) from None


def _warn(line: str) -> None:
    warnings.warn(_in_python(line), stacklevel=CALL_DEPTH)


def _in_python(text: str) -> str:
    """Return a message with flags renamed to keywords, except in commands in backquotes."""
    return re.sub(
        r"`[^`]*`|--([a-z][a-z-]*)",
        lambda match: match[1].replace("-", "_") if match[1] else match[0],
        text,
    )


def _unknown(name: str, known: list[str], flags: Mapping[str, Flag]) -> Exception:
    """Return the error of an unknown keyword, which may be a server option."""
    if name in flags or name in SERVER_OPTIONS:
        return ConfigError(
            f"{name} is a setting of the HTTP server; allowed: as --{name.replace('_', '-')} of "
            "lockstep serve. Remove it."
        )
    near = get_close_matches(name, [*known, *flags], n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    return choice_error(
        ConfigError, "setting", name, ", ".join(known), f"{meant}Remove or rename it."
    )
