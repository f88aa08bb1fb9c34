"""Command line options generated from the settings dataclasses and from SamplingParams."""

import inspect
import json
from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from lockstep.cache.events_config import KVEventsConfig
from lockstep.cli.vllm.command import panel_of
from lockstep.cli.vllm.read import CONFIG
from lockstep.config import EngineConfig, adapter_paths, backends_by_op
from lockstep.errors import ConfigError, brief, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.serve.settings import ServerSettings
from lockstep.settings import Settings, allowed_by
from lockstep.spec.config import AUTO, AUTO_DRAFTS, EXAMPLE
from lockstep.text.settings import TextSettings

BUCKETS = ("row_buckets", "prompt_buckets")
"""Settings that list numbers, separated by commas on the command line."""
SAMPLING_HELP = {
    "temperature": "0 is greedy",
    "top_p": "keep the likeliest tokens up to this share",
    "top_k": "keep this many of the likeliest tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the likeliest",
    "repetition_penalty": "above 1 makes tokens seen before less likely",
    "presence_penalty": "subtracted from the logits of tokens already in the output",
    "frequency_penalty": "subtracted from the logits of tokens once per occurrence in the output",
    "max_tokens": "maximum tokens to generate",
    "seed": "the same seed gives the same output; random by default",
}
SPEC_HELP = (
    f"; auto: the checkpoint's own draft module with K={AUTO_DRAFTS} if it has one; none: no drafts"
)

Command = Callable[..., Any]


def engine_options(command: Command) -> Command:
    """Add an option per field of EngineConfig, which the command receives as the dict `settings`.

    The model may be an argument or the option --model. An option that the command defines itself,
    such as the seed of sampling, replaces the engine's option of the same name.
    """
    hints = get_type_hints(EngineConfig)
    reserved_names = {"model", *inspect.signature(command).parameters}
    engine_fields = [f for f in fields(EngineConfig) if f.name not in reserved_names]
    parameters = [_option(f, *_option_type(f, hints[f.name])) for f in engine_fields]
    help = next(f.metadata["help"] for f in fields(EngineConfig) if f.name == "model")
    model_flag = _flag("model", help)
    parameters.insert(0, _parameter("model_flag", _annotated(str | None, model_flag), None))
    config_flag = _flag(CONFIG, "YAML file of flags by their names; the command line overrides it")
    parameters.append(_parameter(CONFIG, _annotated(str | None, config_flag), None))

    def read(values: dict[str, Any]) -> dict[str, Any]:
        flag_value = values.pop("model_flag")
        values.pop(CONFIG)  # FlagCommand has read the file already
        settings = {f.name: values.pop(f.name) for f in engine_fields}
        settings = {
            name: _read_option(EngineConfig, name, value) for name, value in settings.items()
        }
        settings["model"] = _resolve_model(values.pop("model", None), flag_value)
        return {"settings": settings}

    return _with_parameters(command, parameters, read, replaced="settings")


def _resolve_model(argument: str | None, flag: str | None) -> str | None:
    """Return the model of the argument or the option. Raises ConfigError if they differ."""
    if argument is not None and flag is not None and argument != flag:
        raise ConfigError(
            f"model={brief(argument)} and --model={brief(flag)} are two models; allowed: one. "
            "Leave one of them out."
        )
    return argument if argument is not None else flag


def text_options(command: Command) -> Command:
    """Add an option per field of TextSettings, which the command receives as the dict `text`."""
    hints = get_type_hints(TextSettings)
    text_fields = fields(TextSettings)
    parameters = [_option(f, *_option_type(f, hints[f.name])) for f in text_fields]

    def read(values: dict[str, Any]) -> dict[str, Any]:
        text_settings = {
            f.name: _read_option(TextSettings, f.name, values.pop(f.name)) for f in text_fields
        }
        TextSettings(**text_settings)  # raises for invalid values before a model is loaded
        return {"text": text_settings}

    return _with_parameters(command, parameters, read, replaced="text")


def server_options(command: Command) -> Command:
    """Add an option per field of ServerSettings, which the command receives as `server`."""
    hints = get_type_hints(ServerSettings)
    server_fields = fields(ServerSettings)
    parameters = [_option(f, *_option_type(f, hints[f.name])) for f in server_fields]

    def read(values: dict[str, Any]) -> dict[str, Any]:
        return {"server": ServerSettings(**{f.name: values.pop(f.name) for f in server_fields})}

    return _with_parameters(command, parameters, read, replaced="server")


def sampling_options(command: Command) -> Command:
    """Add the options of SAMPLING_HELP; the command receives the used ones as `sampling`."""
    hints: dict[str, Any] = get_type_hints(SamplingParams)
    sampling_fields = [f for f in fields(SamplingParams) if f.name in SAMPLING_HELP]
    parameters = []
    for field in sampling_fields:
        value_type = hints[field.name] | None
        flag = _flag(field.name, SAMPLING_HELP[field.name])
        parameters.append(_parameter(field.name, _annotated(value_type, flag), None))

    def read(values: dict[str, Any]) -> dict[str, Any]:
        values_by_name = {f.name: values.pop(f.name) for f in sampling_fields}
        sampling = {name: value for name, value in values_by_name.items() if value is not None}
        SamplingParams(**sampling)  # raises for invalid values before a model is loaded
        return {"sampling": sampling}

    return _with_parameters(command, parameters, read, replaced="sampling")


def _flag(name: str, help: str) -> Any:
    return typer.Option("--" + name.replace("_", "-"), help=help, rich_help_panel=panel_of(name))


def _option_type(field: Field[Any], hint: Any) -> tuple[Any, Any]:
    """Return the option's type and default; JSON and lists are strings on the command line."""
    if field.metadata.get("is_size"):
        return (str | None, None) if field.default is None else (str, f"{field.default:g}")
    if field.name == "speculative_config":
        return str, AUTO
    if field.name in BUCKETS:
        return str | None, None
    if field.name == "kv_cache_dtype_skip_layers":
        return str, ""
    if field.name in ("kernels", "lora_modules"):
        return list[str] | None, None
    if get_origin(hint) is Literal:
        return str, field.default
    if get_origin(hint) is tuple:
        return list[str] | None, None
    if _is_object(hint):
        return str | None, None
    return hint, field.default


def _is_object(hint: Any) -> bool:
    """Return whether a setting's type is dict or settings, or None; its option is JSON."""
    types = {get_origin(member) or member for member in get_args(hint)}
    return NoneType in types and types <= {dict, KVEventsConfig, NoneType}


def _read_option(settings: type[Settings], name: str, value: Any) -> Any:
    """Convert an option's value to that of its setting. Raises ConfigError."""
    if name in READERS:
        return READERS[name](value)
    field = next(candidate for candidate in fields(settings) if candidate.name == name)
    if value is None or not _is_object(get_type_hints(settings)[name]):
        return value
    json_object = _read_json_object(value)
    if json_object is None:
        allowed = f"{allowed_by(field)}, as JSON"
        raise choice_error(ConfigError, name, value, allowed, "Write a JSON object.")
    return json_object


def _read_json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; return None if the text is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _option(field: Field[Any], hint: Any, default: Any) -> inspect.Parameter:
    help = field.metadata["help"] + (SPEC_HELP if field.name == "speculative_config" else "")
    # A switch that is on by default needs a negated form.
    if hint is bool and default:
        name = field.name.replace("_", "-")
        panel = panel_of(field.name)
        flag = typer.Option(f"--{name}/--no-{name}", help=help, rich_help_panel=panel)
    else:
        flag = _flag(field.name, help)
    return _parameter(field.name, _annotated(hint, flag), default)


def _annotated(value_type: Any, option: Any) -> Any:
    """Return Annotated[value_type, option] for types that are only known at run time."""
    annotated: Any = Annotated
    return annotated[value_type, option]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _with_parameters(
    command: Command,
    new_parameters: list[inspect.Parameter],
    read: Callable[[dict[str, Any]], dict[str, Any]],
    replaced: str,
) -> Command:
    """Return the command with new parameters, which `read` converts to the argument `replaced`."""

    def run(**values: Any) -> Any:
        # read pops the values that it converts, so `values` has only the remaining ones after it.
        converted = read(values)
        return command(**{**values, **converted})

    signature = inspect.signature(command)
    remaining = [
        parameter for parameter in signature.parameters.values() if parameter.name != replaced
    ]
    run.__signature__ = signature.replace(parameters=[*remaining, *new_parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {
        parameter.name: parameter.annotation for parameter in [*remaining, *new_parameters]
    }
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def changed_settings(settings: dict[str, Any], except_for: tuple[str, ...]) -> list[str]:
    """Return the names of engine settings that differ from their defaults.

    except_for: names that are ignored.
    """
    defaults = {f.name: _option_type(f, None)[1] for f in fields(EngineConfig)}
    defaults |= {name: read(defaults[name]) for name, read in READERS.items()}
    return [
        name
        for name, value in settings.items()
        if name not in except_for and value != defaults[name]
    ]


def read_buckets(name: str, value: str | None) -> tuple[int, ...] | None:
    """Parse --row-buckets or --prompt-buckets such as 1,2,4. Raises ConfigError."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError:
        allowed = "whole numbers separated by commas, e.g. 1,2,4,8"
        raise choice_error(
            ConfigError, name, value, allowed, "Separate numbers by commas."
        ) from None


def read_speculative_config(value: str) -> dict[str, Any] | str | None:
    """Parse --speculative-config: a JSON object, "none" (None), or "auto". Raises ConfigError."""
    if value in (AUTO, "none"):
        return value if value == AUTO else None
    config = _read_json_object(value)
    if config is None:
        allowed = f"auto, none, or a JSON object, e.g. '{EXAMPLE}'"
        raise choice_error(ConfigError, "speculative_config", value, allowed, "Use one of them.")
    return config


def read_skip_layers(value: str) -> tuple[str, ...]:
    """Parse --kv-cache-dtype-skip-layers such as first,3."""
    return tuple(part.strip() for part in value.split(",")) if value else ()


def read_kernels(value: list[str] | None) -> Any:
    """Parse --kernels OP=BACKEND, which may be repeated and may list several, comma-separated."""
    if value is None:
        return None
    return backends_by_op([part.strip() for entry in value for part in entry.split(",")])


READERS: dict[str, Callable[[Any], Any]] = {
    "kernels": read_kernels,
    "kv_cache_dtype_skip_layers": read_skip_layers,
    "lora_modules": adapter_paths,
    **{name: partial(read_buckets, name) for name in BUCKETS},
    "speculative_config": read_speculative_config,
}
"""Parser by name of a setting whose option is a string or a list of strings."""
