"""Parsing of JSON bodies. Large ones are parsed in a thread, while the event loop continues.

Python's parser in C keeps the interpreter lock until the end of the text, its parser in Python
releases it in between. So the slower one parses large bodies.
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

LARGE_BODY_BYTES = 512 << 10
"""Size from which a body is parsed in a thread. The parser in C takes up to 25 ms for it."""
MAX_VALUES = 1 << 17
"""Maximum objects, lists and fields of a body. More would delay the event loop in validation and in
garbage collection."""
Parse = Callable[..., Any]


class BodyReader:
    """Parser of bodies. Large ones are parsed one after the other, so that they use one core."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-body")

    async def read(self, body: bytes) -> Any:
        """Return the value of a body.

        Raises ValueError or RecursionError for text that is not JSON, and HTTPException for too
        many values.
        """
        if len(body) < LARGE_BODY_BYTES:
            return json.loads(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _parse_counted, body)


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

    def __init__(self) -> None:
        super().__init__()
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


def _parse_counted(body: bytes) -> Any:
    return json.loads(body, cls=_Decoder)
