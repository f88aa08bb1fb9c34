"""Base models of request bodies, and the treatment of fields that they do not have.

A body (`Body`) keeps its unknown fields: `unsupported_fields` says which of them would change the
answer. A nested object (`Nested`) refuses unknown fields by their path, so that a misspelt field is
never ignored. An object that the chat template reads (`TemplateObject`) keeps them for the
template; `check_extra_fields` refuses those that the template does not read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lockstep.errors import RequestError
from lockstep.serve.http.errors import MAX_SHOWN_CHARACTERS, UNKNOWN_FIELD, field_remedy
from lockstep.serve.requests.unsupported_fields import resolve_aliases

MAX_FIELDS = 1024
"""Maximum number of fields of an object, unknown ones included."""
ANNOTATION_FIELDS = frozenset(
    {
        "annotations",
        "cache_control",
        "citations",
        "id",
        "index",
        "logprobs",
        "phase",
        "prompt_cache_breakpoint",
        "provider_specific_fields",
        "status",
    }
)
"""Fields that responses and clients add to any part of a conversation. No model reads them."""


class Body(BaseModel):
    """A request's body. Null fields count as absent, unknown ones are kept."""

    OWN_NAMES: ClassVar[Mapping[str, str] | None] = None
    """Name of a field in unsupported_fields.ALIASES -> its name in this body. None: the body has
    no aliases."""
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields that are ignored, since they change no answer."""
    ONLY_DEFAULTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Unsupported fields -> values that are ignored, since they describe the behavior of this
    server."""
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _remove_ignored(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields; allowed: at most {MAX_FIELDS}")
        sent = {
            key: entry
            for key, entry in value.items()
            if entry is not None
            and key not in cls.WITHOUT_EFFECT
            and not is_one_of(entry, cls.ONLY_DEFAULTS.get(key, ()))
        }
        fields = sent if cls.OWN_NAMES is None else resolve_aliases(sent, cls.OWN_NAMES)
        numbers = _number_fields(cls)
        for name, entry in fields.items():
            # pydantic would take true for 1, and false for 0.
            if isinstance(entry, bool) and name in numbers:
                text = f"Input should be a number, not {str(entry).lower()}"
                raise PydanticCustomError("number_type", text, {"inside": (name,)})
        return fields


@cache
def _number_fields(body: type[Body]) -> frozenset[str]:
    """Return the names of a body's fields that are numbers."""
    return frozenset(
        name
        for name, field in body.model_fields.items()
        if {int, float}.intersection((field.annotation, *get_args(field.annotation)))
    )


class Nested(Body):
    """A nested object, whose unknown fields are refused by their path."""

    model_config = ConfigDict(extra="forbid")


class TemplateObject(Body):
    """An object that the chat template reads exactly as it was sent."""

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        parsed = handler(value)
        if isinstance(value, dict):
            parsed._sent = value
        return parsed

    @property
    def sent(self) -> dict[str, Any]:
        """The object with its keys in the client's order."""
        return self._sent

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the name and the path of every unknown field, with those of nested objects."""
        for name in self.model_extra or ():
            yield name, f"{path}.{name}"


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Return whether a value equals one of these and has its type: true is not 1."""
    return any(type(value) is type(other) and value == other for other in values)


Shape = Mapping[str, "Shape | None"]
"""Names of an object's fields -> the Shape of an object in that field, or None for any value."""


def known_fields(shape: Shape, *open_types: str) -> AfterValidator:
    """Return the validator that an object has only the fields of a shape.

    open_types: values of the field `type` whose objects have other fields, checked elsewhere.
    """

    def check(value: Any) -> Any:
        is_open = isinstance(value, dict) and value.get("type") in open_types
        return value if is_open else check_shape(value, shape)

    return AfterValidator(check)


def check_shape(value: Any, shape: Shape, path: tuple[str, ...] = ()) -> Any:
    """Return a value whose objects have only the fields of a shape; null fields count as absent.

    Raises PydanticCustomError, which names the first unknown field.
    """
    for name, entry in value.items() if isinstance(value, dict) else ():
        if entry is None:
            continue
        if name not in shape:
            # "inside" continues the path of the error within the value.
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown", {"inside": (*path, name)})
        inner = shape[name]
        if inner is not None:
            check_shape(entry, inner, (*path, name))
    return value


def check_extra_fields(
    objects: Iterable[TemplateObject] | None, field: str, is_read: Callable[[str], bool]
) -> None:
    """Raise RequestError for an unknown field of a list's objects that the template does not read.

    field: name of the list. is_read: whether the template reads a field of this name.
    """
    for i, entry in enumerate(objects or ()):
        for name, path in entry.extra_fields(f"{field}[{i}]"):
            if not is_read(name):
                raise RequestError(f"{path[:MAX_SHOWN_CHARACTERS]} {field_remedy(name)}", field)


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields that the client sent, not those that they were converted to.

    names: internal field -> field of the body.
    """
    try:
        yield
    except RequestError as error:
        internal = error.field or ""
        sent = names.get(internal, internal)
        message = str(error)
        # A message begins with its field; a longer name that only begins so is another field.
        if message.startswith(tuple(f"{internal}{sign}" for sign in "= ,:.")):
            error.args = (sent + message.removeprefix(internal),)
        error.field = sent or None
        raise
