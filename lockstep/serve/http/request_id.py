"""The outermost layer of the application: every request has a name, and every answer bears it."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.http.errors import speaks_anthropic
from lockstep.serve.http.request_context import CALLER, Caller, Header

BODY = "lockstep.body"
"""What sends an answer's body on from here, in the scope: no layer further in changes bodies, and
each would cost time with every piece of a stream."""


class Named:
    """ASGI layer: every request has a caller, and every answer bears the request's id.

    root_path: the path under which a proxy shows the server.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.root_path:
            scope["root_path"] = self.root_path
        caller = Caller.of(scope["headers"])
        CALLER.set(caller)
        scope[BODY] = send
        own = _headers(caller, scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        await self.app(scope, receive, named)


def _headers(caller: Caller, scope: Scope) -> list[Header]:
    """Return the headers with the request's id: OpenAI's, and Anthropic's for its routes."""
    value = caller.request_id.encode("ascii")
    headers = [(b"x-request-id", value)]
    return [*headers, (b"request-id", value)] if speaks_anthropic(scope) else headers
