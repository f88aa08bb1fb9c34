"""Parsing of JSON bodies. Large ones are parsed in a thread, while the event loop continues.

Python's parser in C keeps the interpreter lock until the end of the text, its parser in Python
releases it in between. So the slower one parses large bodies.

JSON's syntax allows two things that have no single meaning: a field that an object has twice, and
half of a surrogate pair. Both are refused here, so that no later code sees them.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from json import decoder, scanner
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Scope

from lockstep.errors import RequestError, brief
from lockstep.serve.http.errors import path_text

LARGE_BODY_BYTES = 512 << 10
"""Size from which a body is parsed in a thread. The parser in C takes up to 35 ms for it."""
MAX_VALUES = 1 << 17
"""Maximum objects, lists and fields of a body. More would delay the event loop in validation and in
garbage collection."""
WHOLE_CHARACTERS = re.compile(
    r"(?:[^\\\ud800-\udfff]++"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|\\[^u])*+"
)
"""Pattern of JSON text up to the first half of a surrogate pair, escaped or not."""
MATCHED_CHARACTERS = 1 << 16
"""Characters that are matched while the interpreter lock is kept. An escape takes 0.05 us."""
MAX_SEARCHED = 1 << 15
"""Maximum keys and values that are searched for the text at fault, which takes up to 20 ms."""
Parse = Callable[..., Any]


class BodyReader:
    """Parser of bodies. Large ones are parsed one after the other, so that they use one core."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-body")

    async def read(self, body: bytes) -> Any:
        """Return the value of a body.

        Raises ValueError or RecursionError for text that is not JSON, HTTPException for too many
        values, and RequestError for a value that has no single meaning.
        """
        if len(body) < LARGE_BODY_BYTES:
            return _parse(body, json.JSONDecoder)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _parse, body, _Decoder)


class BodyRoute(APIRoute):
    """Route whose body app.state.body_reader parses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that gets a _JsonRequest."""
        handle = super().get_route_handler()

        async def with_reader(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return with_reader


class _JsonRequest(Request):
    """Request whose body the application's BodyReader parses."""

    async def json(self) -> Any:
        """Return the value of the body: see BodyReader."""
        return await _reader_of(self.scope).read(await self.body())


def _reader_of(scope: Scope) -> BodyReader:
    reader = scope["app"].state.body_reader
    assert isinstance(reader, BodyReader)
    return reader


class _Decoder(json.JSONDecoder):
    """JSON decoder in Python that limits the number of values."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self._num_values = 0
        self._decode_object: Parse = decoder.JSONObject  # type: ignore[attr-defined]
        self._decode_array: Parse = decoder.JSONArray  # type: ignore[attr-defined]
        self.parse_object = self._counted_object
        self.parse_array = self._counted_array
        # Only the scanner in Python calls these methods; the one in C ignores them.
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted_object(self, state: Any, strict: bool, scan: Parse, *hooks: Any) -> Any:
        self._count()
        return self._decode_object(state, strict, partial(self._counted_field, scan), *hooks)

    def _counted_field(self, scan: Parse, text: str, end: int) -> Any:
        self._count()
        return scan(text, end)

    def _counted_array(self, *args: Any) -> Any:
        self._count()
        return self._decode_array(*args)

    def _count(self) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise HTTPException(
                400,
                f"the body has more than {MAX_VALUES} objects, lists and fields, which is the most "
                "that is allowed; send fewer.",
            )


def _parse(body: bytes, decoder_class: type[json.JSONDecoder]) -> Any:
    """Return the value of a body. Raises as BodyReader.read does."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    value = json.loads(text, cls=decoder_class, object_pairs_hook=_unique_fields)
    if not _has_whole_characters(text):
        raise _half_error(value)
    return value


def _has_whole_characters(text: str) -> bool:
    """Return whether a JSON text has no half of a surrogate pair."""
    end = 0
    while end < len(text):
        match = WHOLE_CHARACTERS.match(text, end, end + MATCHED_CHARACTERS)
        if match is None or match.end() == end:
            return False
        end = match.end()
    return True


def _unique_fields(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises RequestError for a field with two values.

    Parsers differ in which of the two they keep: a proxy might check the other one.
    """
    result = dict(fields)
    if len(result) < len(fields):
        for name, value in fields:
            if type(value) is not type(result[name]) or value != result[name]:
                message = (
                    f"the field {brief(name)} occurs twice in an object, with different values; "
                    "allowed: one value. Send one of them."
                )
                raise RequestError(message, _encodable(name))
    return result


def _half_error(value: Any) -> RequestError:
    """Return the error of a body with half of a surrogate pair, which no answer could repeat."""
    for path, entry in islice(_entries_of(value), MAX_SEARCHED):
        index = _index_of_half(entry) if isinstance(entry, str) else None
        if index is not None:
            return _error_at(path, index)
    return RequestError(
        "the body has half of a surrogate pair; allowed: whole characters. Send the whole "
        "character, or remove it."
    )


def _entries_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each key and each value in a JSON value, with its path.

    Paths are linked lists: copies of the paths of a deep value would take its square.
    """
    pending: list[tuple[Any, Any]] = [(value, None)] if isinstance(value, (dict, list)) else []
    while pending:
        node, path = pending.pop()
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            yield (path, key), key
            yield (path, key), part
            if part and isinstance(part, (dict, list)):
                pending.append((part, (path, key)))


def _error_at(path: Any, index: int) -> RequestError:
    """Return the error of one text. path: linked list from the last key to the first."""
    keys: list[Any] = []
    while path is not None:
        path, key = path
        keys.insert(0, key)
    message = (
        f"{path_text(keys)}: character {index} is half of a surrogate pair. Send the whole "
        "character, or remove it."
    )
    return RequestError(_encodable(message), _encodable(str(keys[0])))


def _index_of_half(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _encodable(text: str) -> str:
    """Return a text with an escape for each half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()
