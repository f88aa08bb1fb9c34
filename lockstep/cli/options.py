"""Options made from dataclasses: settings of engine, text and server, fields of SamplingParams."""

import inspect
import json
from collections.abc import Callable
from dataclasses import Field, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from lockstep.cli.vllm.command import panel_of
from lockstep.cli.vllm.read import CONFIG
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError, brief, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.serve.settings import ServerSettings
from lockstep.settings import Settings, allowed_by
from lockstep.spec.config import AUTO, AUTO_DRAFTS, EXAMPLE
from lockstep.text.settings import TextSettings

SAMPLING_HELP = {
    "temperature": "0 is greedy",
    "top_p": "keep the likeliest tokens up to this share",
    "top_k": "keep this many of the likeliest tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the likeliest",
    "repetition_penalty": "above 1 makes tokens seen before less likely",
    "presence_penalty": "taken off the logits of tokens already in the answer",
    "frequency_penalty": "the same, per time that they are in it",
    "max_tokens": "maximum tokens to generate",
    "seed": "the same seed gives the same answer; drawn if left out",
}
SPEC_HELP = (
    f"; auto: the checkpoint's own draft module with K={AUTO_DRAFTS} if it has one; none: no drafts"
)

Command = Callable[..., Any]


def engine_options(command: Command) -> Command:
    """Adds an option per field of EngineConfig; the command gets them all as `settings`, a dict.

    The model may stand as an argument, where the command has one, or after --model. An option of
    the command's own, such as the seed of sampling, goes before the engine's of the same name.
    """
    hints = get_type_hints(EngineConfig)
    taken = {"model", *inspect.signature(command).parameters}
    own = [f for f in fields(EngineConfig) if f.name not in taken]
    added = [_option(f, *_typed(f, hints[f.name])) for f in own]
    help = next(f.metadata["help"] for f in fields(EngineConfig) if f.name == "model")
    model = _flag("model", help)
    added.insert(0, _parameter("model_flag", _with(str | None, model), None))
    file = _flag(CONFIG, "a YAML file of flags, by their names; the command line has the last word")
    added.append(_parameter(CONFIG, _with(str | None, file), None))

    def read(values: dict[str, Any]) -> dict[str, Any]:
        flag = values.pop("model_flag")
        values.pop(CONFIG)  # it was read before
        settings = {f.name: values.pop(f.name) for f in own}
        settings = {name: _read(EngineConfig, name, value) for name, value in settings.items()}
        settings["model"] = _one_model(values.pop("model", None), flag)
        return {"settings": settings}

    return _extended(command, added, read, drop="settings")


def _one_model(named: str | None, flag: str | None) -> str | None:
    """The model, from the argument or the flag. Raises ConfigError where both name one."""
    if named is not None and flag is not None and named != flag:
        raise ConfigError(
            f"model={brief(named)} and --model={brief(flag)} are two models; allowed: one. Leave "
            "one of them out."
        )
    return named if named is not None else flag


def text_options(command: Command) -> Command:
    """Adds an option per field of TextSettings; the command gets them as `text`, a dict."""
    hints = get_type_hints(TextSettings)
    own = fields(TextSettings)
    added = [_option(f, *_typed(f, hints[f.name])) for f in own]

    def read(values: dict[str, Any]) -> dict[str, Any]:
        found = {f.name: _read(TextSettings, f.name, values.pop(f.name)) for f in own}
        TextSettings(**found)  # what is wrong is told before a model is loaded
        return {"text": found}

    return _extended(command, added, read, drop="text")


def server_options(command: Command) -> Command:
    """Adds an option per field of ServerSettings; the command gets them as `server`, checked."""
    hints = get_type_hints(ServerSettings)
    own = fields(ServerSettings)
    added = [_option(f, *_typed(f, hints[f.name])) for f in own]

    def read(values: dict[str, Any]) -> dict[str, Any]:
        return {"server": ServerSettings(**{f.name: values.pop(f.name) for f in own})}

    return _extended(command, added, read, drop="server")


def sampling_options(command: Command) -> Command:
    """Adds the options of SAMPLING_HELP; the command gets those given as `sampling`, a dict."""
    hints: dict[str, Any] = get_type_hints(SamplingParams)
    own = [f for f in fields(SamplingParams) if f.name in SAMPLING_HELP]
    added = []
    for field in own:
        kind = hints[field.name] | None
        flag = _flag(field.name, SAMPLING_HELP[field.name])
        added.append(_parameter(field.name, _with(kind, flag), None))

    def read(values: dict[str, Any]) -> dict[str, Any]:
        given = {f.name: values.pop(f.name) for f in own}
        sampling = {name: value for name, value in given.items() if value is not None}
        SamplingParams(**sampling)  # what is wrong is told before a model is loaded
        return {"sampling": sampling}

    return _extended(command, added, read, drop="sampling")


def _flag(name: str, help: str) -> Any:
    return typer.Option("--" + name.replace("_", "-"), help=help, rich_help_panel=panel_of(name))


def _typed(field: Field[Any], hint: Any) -> tuple[Any, Any]:
    """The option's type and default: JSON and lists are strings on the command line."""
    if field.metadata.get("is_size"):
        return (str | None, None) if field.default is None else (str, f"{field.default:g}")
    if field.name == "speculative_config":
        return str, AUTO
    if field.name == "row_buckets":
        return str | None, None
    if field.name == "kv_cache_dtype_skip_layers":
        return str, ""
    if get_origin(hint) is Literal:
        return str, field.default
    if get_origin(hint) is tuple:
        return list[str] | None, None
    if _is_object(hint):
        return str | None, None
    return hint, field.default


def _is_object(hint: Any) -> bool:
    """Whether a setting is a dict, or None: JSON on the command line."""
    kinds = {get_origin(kind) or kind for kind in get_args(hint)}
    return kinds == {dict, NoneType}


def _read(settings: type[Settings], name: str, value: Any) -> Any:
    """An option's value as its setting has it. Raises ConfigError."""
    if name in READERS:
        return READERS[name](value)
    field = next(one for one in fields(settings) if one.name == name)
    if value is None or not _is_object(get_type_hints(settings)[name]):
        return value
    found = _object(value)
    if found is None:
        allowed = f"{allowed_by(field)}, as JSON"
        raise choice_error(ConfigError, name, value, allowed, "Write a JSON object.")
    return found


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object; None if the text is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _option(field: Field[Any], hint: Any, default: Any) -> inspect.Parameter:
    help = field.metadata["help"] + (SPEC_HELP if field.name == "speculative_config" else "")
    if hint is bool and default:
        name = field.name.replace("_", "-")
        panel = panel_of(field.name)
        flag = typer.Option(f"--{name}/--no-{name}", help=help, rich_help_panel=panel)
    else:
        flag = _flag(field.name, help)
    return _parameter(field.name, _with(hint, flag), default)


def _with(kind: Any, option: Any) -> Any:
    """Annotated[kind, option], of values."""
    annotated: Any = Annotated
    return annotated[kind, option]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _extended(
    command: Command,
    added: list[inspect.Parameter],
    read: Callable[[dict[str, Any]], dict[str, Any]],
    drop: str,
) -> Command:
    """`command` with more parameters in its signature, which `read` turns into one argument."""

    def run(**values: Any) -> Any:
        return command(**{**(given := read(values)), **values, **given})

    signature = inspect.signature(command)
    kept = [p for p in signature.parameters.values() if p.name != drop]
    run.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*kept, *added]}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def changed_settings(settings: dict[str, Any], except_for: tuple[str, ...]) -> list[str]:
    """Return the names of engine settings that are not at their defaults, but for some."""
    usual = {f.name: _typed(f, None)[1] for f in fields(EngineConfig)}
    usual |= {name: read(usual[name]) for name, read in READERS.items()}
    return [
        name for name, value in settings.items() if name not in except_for and value != usual[name]
    ]


def read_row_buckets(value: str | None) -> tuple[int, ...] | None:
    """1,2,4 -> (1, 2, 4). Raises ConfigError."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        allowed = "whole numbers separated by commas, e.g. 1,2,4,8"
        raise choice_error(
            ConfigError, "row_buckets", value, allowed, "Separate numbers by commas."
        ) from None


def read_speculative_config(value: str) -> dict[str, Any] | str | None:
    """JSON, "none" -> None, or "auto" as it is. Raises ConfigError."""
    if value in (AUTO, "none"):
        return value if value == AUTO else None
    found = _object(value)
    if found is None:
        allowed = f"auto, none, or a JSON object, e.g. '{EXAMPLE}'"
        raise choice_error(ConfigError, "speculative_config", value, allowed, "Use one of them.")
    return found


def read_skip_layers(value: str) -> tuple[str, ...]:
    """first,3 -> ("first", "3")."""
    return tuple(part.strip() for part in value.split(",")) if value else ()


READERS: dict[str, Callable[[Any], Any]] = {
    "kv_cache_dtype_skip_layers": read_skip_layers,
    "row_buckets": read_row_buckets,
    "speculative_config": read_speculative_config,
}
