"""Objects of a request's body, and what becomes of fields that they do not have.

A body (`Body`) keeps its unknown fields aside: `refused` says which would change the answer. An
object inside of a body (`Nested`) refuses unknown fields by their path, so that a misspelt field is
never dropped in silence. An object that the chat template reads (`Sent`) keeps them for the
template; `unread_field` finds those that it does not read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

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
from lockstep.serve.http.errors import SHOWN, UNKNOWN_FIELD, remedy_of
from lockstep.serve.requests.unsupported_fields import with_own_names

MAX_FIELDS = 1024
"""Maximum number of fields of an object, unknown ones included."""
NOTES = frozenset(
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
"""Fields that answers and clients add to any part of a conversation. No model reads them."""


class Body(BaseModel):
    """A request's body: null fields count as absent, unknown ones are kept aside."""

    OWN_NAMES: ClassVar[Mapping[str, str] | None] = None
    """Fields of a request that are named otherwise here than in refused.ALIASES; None: the object
    has no aliases."""
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields that are dropped, since they change no answer."""
    ONLY_DEFAULTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are dropped where they have one of these values: they say what happens anyway."""
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, value: Any) -> Any:
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
        return sent if cls.OWN_NAMES is None else with_own_names(sent, cls.OWN_NAMES)


class Nested(Body):
    """An object inside of a body, whose unknown fields are refused by their path."""

    model_config = ConfigDict(extra="forbid")


class Sent(Body):
    """An object that the chat template reads just as it was sent."""

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        parsed = handler(value)
        if isinstance(value, dict):
            parsed._sent = value
        return parsed

    @property
    def sent(self) -> dict[str, Any]:
        """The object with its keys in the client's order."""
        return self._sent

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the name and the path of every field that is not known, those of parts too."""
        for name in self.model_extra or ():
            yield name, f"{path}.{name}"


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Return whether a value equals one of these and is of its type: true is not 1."""
    return any(type(value) is type(other) and value == other for other in values)


Shape = Mapping[str, "Shape | None"]
"""Names of an object's fields -> the Shape of an object in that field, or None for any value."""


def known_fields(shape: Shape, *open_types: str) -> AfterValidator:
    """Return the check that an object has only the fields of a shape.

    open_types: values of the field `type` whose objects have other fields, checked elsewhere.
    """

    def check(value: Any) -> Any:
        is_open = isinstance(value, dict) and value.get("type") in open_types
        return value if is_open else check_shape(value, shape)

    return AfterValidator(check)


def check_shape(value: Any, shape: Shape, path: tuple[str, ...] = ()) -> Any:
    """Return a value whose objects have only the fields of a shape; null fields count as absent.

    Raises PydanticCustomError, which names the first field that is not known.
    """
    for name, entry in value.items() if isinstance(value, dict) else ():
        if entry is None:
            continue
        if name not in shape:
            # The path of the error goes on inside of the value.
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown", {"inside": (*path, name)})
        inner = shape[name]
        if inner is not None:
            check_shape(entry, inner, (*path, name))
    return value


def check_extra_fields(
    objects: Iterable[Sent] | None, field: str, reads: Callable[[str], bool]
) -> None:
    """Raise RequestError for an unknown field of a list's objects that the template does not read.

    reads: whether the template reads a field of this name.
    """
    for i, one in enumerate(objects or ()):
        for name, path in one.extra_fields(f"{field}[{i}]"):
            if not reads(name):
                raise RequestError(f"{path[:SHOWN]} {remedy_of(name)}", field)
