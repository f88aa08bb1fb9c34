"""Settings of a model's text side: chat template, parsers, sampling defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import isdir  # Path.is_dir raises where a name is too long
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from lockstep.errors import ConfigError, RequestError, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.settings import Settings, path_fault, read_text_file, setting
from lockstep.text.parsers import REASONING_PARSERS, TOOL_PARSERS

CHECKPOINTS = "auto"
"""Value of generation_config: the checkpoint's file."""
NEUTRAL = "vllm"
"""Value of generation_config: no file."""
SAMPLING_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
MAX_NEW_TOKENS = "max_new_tokens"
OVERRIDABLE = (*SAMPLING_DEFAULTS, MAX_NEW_TOKENS, "do_sample")
"""Settings of generation_config.json that affect sampling."""
READ_SETTINGS = frozenset((*OVERRIDABLE, "eos_token_id"))
"""Settings of generation_config.json that are read; the tokenizer reads eos_token_id."""
PARSER_REMEDY = "Choose one of them, or remove it."
OBJECT_REMEDY = "Write it as a dict, or remove it."


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
    """Settings of the chat template, the parsers and the sampling defaults, with vLLM's names."""

    chat_template: str | None = setting(
        None, "chat template: its text or a file; default: the checkpoint's"
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        None,
        "default variables of the chat template",
        allowed="a dict of the template's variables",
        remedy=OBJECT_REMEDY,
    )
    tool_call_parser: Annotated[str, AfterValidator(_one_of(TOOLS))] = setting(
        "auto",
        "tool-call parser; auto: chosen by the chat template",
        allowed=", ".join(TOOLS),
        remedy=PARSER_REMEDY,
    )
    reasoning_parser: Annotated[str, AfterValidator(_one_of(REASONING))] = setting(
        "auto",
        "reasoning parser; auto: chosen by the chat template",
        allowed=", ".join(REASONING),
        remedy=PARSER_REMEDY,
    )
    generation_config: str = setting(
        CHECKPOINTS,
        "source of sampling defaults: auto (the checkpoint's generation_config.json), vllm (no "
        "file), or a folder with that file",
    )
    override_generation_config: dict[str, Any] | None = setting(
        None,
        "sampling defaults that override generation_config.json",
        allowed=f"a dict of {', '.join(OVERRIDABLE)}",
        remedy=OBJECT_REMEDY,
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid setting or a missing file."""
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
            ("default_chat_template_kwargs", _check_variables),
        ):
            try:
                check(getattr(self, field) or {})
            except RequestError as error:
                raise ConfigError(f"{field}: {error}") from None

    def template(self) -> str | None:
        """Return the text of the chosen chat template. Raises ConfigError if its file cannot be
        read."""
        choice = self.chat_template
        if choice is None or "{" in choice or "\n" in choice:
            return choice
        try:
            return read_text_file(choice)
        except (OSError, ValueError) as error:
            allowed = f"a file that can be read ({path_fault(error)}), or the template itself"
            remedy = "Name another file."
            raise choice_error(ConfigError, "chat_template", choice, allowed, remedy) from None

    def generation_folder(self, checkpoint: Path) -> Path | None:
        """Return the folder whose generation_config.json is used, or None."""
        if self.generation_config == NEUTRAL:
            return None
        is_checkpoint = self.generation_config == CHECKPOINTS
        return checkpoint if is_checkpoint else Path(self.generation_config)


def _check_variables(chosen: dict[str, Any]) -> None:
    """Raise RequestError for a template variable with a reserved name."""
    # Imported here: jinja2 is slow to import, and --help does not need it.
    from lockstep.text.templates.chat_template import check_kwargs

    check_kwargs(chosen)


def sampling_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a generation_config's sampling defaults with the names of SamplingParams.

    max_new_tokens becomes max_tokens. Raises RequestError for an invalid value.
    """
    defaults = {
        name: settings[name] for name in SAMPLING_DEFAULTS if settings.get(name) is not None
    }
    if settings.get("do_sample") is False:
        defaults["temperature"] = 0.0
    if settings.get(MAX_NEW_TOKENS) is not None:
        defaults["max_tokens"] = settings[MAX_NEW_TOKENS]
    SamplingParams(**defaults)
    return defaults
