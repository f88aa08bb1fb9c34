"""Settings of a model's text side: chat template, parsers, defaults of sampling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import isdir  # Path.is_dir raises where a name is too long
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from lockstep.errors import ConfigError, RequestError, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.settings import Settings, read_named, setting, why_unread
from lockstep.text.parsers import REASONING_PARSERS, TOOL_PARSERS

CHECKPOINTS = "auto"
"""generation_config: the checkpoint's own."""
NEUTRAL = "vllm"
"""generation_config: none."""
SAMPLING_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
MOST_NEW = "max_new_tokens"
OVERRIDABLE = (*SAMPLING_DEFAULTS, MOST_NEW, "do_sample")
"""What of a generation_config.json bears on sampling."""
READ_SETTINGS = frozenset((*OVERRIDABLE, "eos_token_id"))
"""Settings of generation_config.json that some code reads; the tokenizer reads eos_token_id."""
PARSER_REMEDY = "Choose one of them, or leave it out."
OBJECT_REMEDY = "Write it as a dict, or leave it out."


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(name)
        return name

    return check


TOOLS = ("auto", "none", *TOOL_PARSERS)
REASONING = ("auto", "none", *REASONING_PARSERS)


@dataclass(frozen=True)
class TextSettings(Settings):
    """How conversations are written for the model, and its answers read; vLLM's names."""

    chat_template: str | None = setting(
        None, "the chat template, or a file that holds it; the checkpoint's if left out"
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        None,
        "the template's variables where a request names none",
        allowed="a dict of the template's variables",
        remedy=OBJECT_REMEDY,
    )
    tool_call_parser: Annotated[str, AfterValidator(_one_of(TOOLS))] = setting(
        "auto",
        "how tool calls are read; auto: as the template writes them",
        allowed=", ".join(TOOLS),
        remedy=PARSER_REMEDY,
    )
    reasoning_parser: Annotated[str, AfterValidator(_one_of(REASONING))] = setting(
        "auto",
        "how reasoning is read; auto: as the template writes it",
        allowed=", ".join(REASONING),
        remedy=PARSER_REMEDY,
    )
    generation_config: str = setting(
        CHECKPOINTS,
        "whose generation_config.json gives the defaults of sampling: auto (the checkpoint), vllm "
        "(none), or a folder",
    )
    override_generation_config: dict[str, Any] | None = setting(
        None,
        "defaults of sampling that replace those",
        allowed=f"a dict of {', '.join(OVERRIDABLE)}",
        remedy=OBJECT_REMEDY,
    )

    def __post_init__(self) -> None:
        """Raises ConfigError where a setting is wrong, or a file is not there."""
        super().__post_init__()
        self.template()
        named = self.generation_config
        if named not in (CHECKPOINTS, NEUTRAL) and not isdir(named):
            allowed = f"{CHECKPOINTS}, {NEUTRAL}, or a folder with generation_config.json"
            remedy = "Name one of them."
            raise choice_error(ConfigError, "generation_config", named, allowed, remedy)
        for name in self.override_generation_config or {}:
            if name not in OVERRIDABLE:
                field = "override_generation_config key"
                allowed = ", ".join(OVERRIDABLE)
                raise choice_error(ConfigError, field, name, allowed, "Remove or rename it.")
        for field, check in (
            ("override_generation_config", sampling_defaults),
            ("default_chat_template_kwargs", _variables),
        ):
            try:
                check(getattr(self, field) or {})
            except RequestError as error:
                raise ConfigError(f"{field}: {error}") from None

    def template(self) -> str | None:
        """The chosen chat template's text. Raises ConfigError where its file cannot be read."""
        chosen = self.chat_template
        if chosen is None or "{" in chosen or "\n" in chosen:
            return chosen
        try:
            return read_named(chosen)
        except (OSError, ValueError) as error:
            allowed = f"a file that can be read ({why_unread(error)}), or the template itself"
            remedy = "Name another file."
            raise choice_error(ConfigError, "chat_template", chosen, allowed, remedy) from None

    def generation_folder(self, checkpoint: Path) -> Path | None:
        """The folder whose generation_config.json counts; None: none does."""
        if self.generation_config == NEUTRAL:
            return None
        own = self.generation_config == CHECKPOINTS
        return checkpoint if own else Path(self.generation_config)


def _variables(chosen: dict[str, Any]) -> None:
    """Raises RequestError where a template's variable has a name that is taken."""
    from lockstep.text.templates.chat_template import (
        check_kwargs,  # jinja2 takes time, and help needs none
    )

    check_kwargs(chosen)


def sampling_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config says of sampling, in SamplingParams' names; its max_new_tokens is
    max_tokens. Raises RequestError where a value is wrong."""
    found = {name: settings[name] for name in SAMPLING_DEFAULTS if settings.get(name) is not None}
    if settings.get("do_sample") is False:
        found["temperature"] = 0.0
    if settings.get(MOST_NEW) is not None:
        found["max_tokens"] = settings[MOST_NEW]
    SamplingParams(**found)
    return found
