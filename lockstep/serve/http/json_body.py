"""Bodies as JSON. Large ones are parsed beside the event loop, which goes on meanwhile.

Python's fast parser keeps all other threads waiting until it has read the last character, its slow
one lets them run in between. So the slow one reads what would take the fast one long.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from json import decoder, scanner
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Scope

LARGE = 512 << 10
"""Bytes from which a body is parsed in a thread: the fast parser takes up to 25 ms for as many."""
MOST_PARTS = 1 << 17
"""Objects, lists and fields of a body. More keep the loop waiting when an object is made of them,
and when garbage is collected."""
Parse = Callable[..., Any]


class BodyReader:
    """Parses large bodies, one after the other, so that they take one processor at most."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-body")

    async def read(self, body: bytes) -> Any:
        """The body's value. Raises ValueError or RecursionError where it is not JSON, and
        HTTPException where it holds too much."""
        if len(body) < LARGE:
            return json.loads(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _parsed, body)


class BodyRoute(APIRoute):
    """A route whose body comes from app.state.body_reader."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handle = super().get_route_handler()

        async def with_reader(request: Request) -> Response:
            return await handle(_ReadRequest(request.scope, request.receive))

        return with_reader


class _ReadRequest(Request):
    """A request that is read by the application's BodyReader."""

    async def json(self) -> Any:
        """The body's value: see BodyReader."""
        return await _reader_of(self.scope).read(await self.body())


def _reader_of(scope: Scope) -> BodyReader:
    reader = scope["app"].state.body_reader
    assert isinstance(reader, BodyReader)
    return reader


class _Decoder(json.JSONDecoder):
    """Reads in Python, and counts what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self._found = 0
        self._object: Parse = decoder.JSONObject  # type: ignore[attr-defined]
        self._array: Parse = decoder.JSONArray  # type: ignore[attr-defined]
        self.parse_object = self._counted_object
        self.parse_array = self._counted_array
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted_object(self, begun: Any, strict: bool, scan: Parse, *hooks: Any) -> Any:
        self._count()
        return self._object(begun, strict, partial(self._counted_field, scan), *hooks)

    def _counted_field(self, scan: Parse, text: str, end: int) -> Any:
        self._count()
        return scan(text, end)

    def _counted_array(self, *given: Any) -> Any:
        self._count()
        return self._array(*given)

    def _count(self) -> None:
        self._found += 1
        if self._found > MOST_PARTS:
            raise HTTPException(
                400,
                f"the body has more than {MOST_PARTS} objects, lists and fields, which is the most "
                "that is allowed; send fewer.",
            )


def _parsed(body: bytes) -> Any:
    return json.loads(body, cls=_Decoder)
