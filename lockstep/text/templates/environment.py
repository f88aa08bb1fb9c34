"""Jinja environment of chat templates, with the functions, filters and tags of transformers."""

import json
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lockstep.text.tokenizers.control_tokens import ControlTokens


def template_environment(control: ControlTokens | None) -> jinja2.Environment:
    """Return an environment in which chat templates render as in transformers.

    control: tokens whose spellings are marked in strings; tojson keeps the marks.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = partial(_tojson, control)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class GenerationTag(Extension):
    """Tag {% generation %} ... {% endgeneration %}, which training code puts around answers.

    Its body is rendered unchanged. It has its own scope, as in transformers: variables that it sets
    are undefined after it.
    """

    tags = {"generation"}  # jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse the block into a call of _render with the body as its caller."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return caller()


class _TemplateDict:
    """Function dict(), without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return dict.fromkeys(...)."""
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """Function namespace(), whose attributes must not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # no parameter names, so that namespace(self=...) works
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name[:50]!r}, which begins with an underscore"
        )


def _tojson(
    control: ControlTokens | None,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON; unlike Jinja's filter, without HTML escapes."""
    plain = ensure_ascii and control is None
    text = json.dumps(
        value, ensure_ascii=plain, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return control.ascii_json(text) if ensure_ascii and control is not None else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
