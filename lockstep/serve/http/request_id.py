"""Outermost layer of the application: it gives every request and response an id."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.http.errors import LOGGED_ERROR, is_anthropic
from lockstep.serve.http.request_context import REQUEST_CONTEXT, Header, RequestContext

SEND_BODY = "lockstep.send_body"
"""Key of the scope: the `send` that streams use for their bodies. No inner layer changes bodies,
and each would cost time for every event of a stream."""


class RequestIdMiddleware:
    """ASGI middleware that sets REQUEST_CONTEXT and adds the request's id to the response.

    It ends the unexpected errors that were logged.

    root_path: path prefix under which a proxy publishes the server.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.root_path:
            scope["root_path"] = self.root_path
        context = RequestContext.from_headers(scope["headers"])
        REQUEST_CONTEXT.set(context)
        scope[SEND_BODY] = send
        id_headers = _id_headers(context, scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *id_headers]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            # Starlette raises what its handler has answered. uvicorn would log it a second time.
            if scope.get(LOGGED_ERROR) is not error:
                raise


def _id_headers(context: RequestContext, scope: Scope) -> list[Header]:
    """Return the headers with the request's id: OpenAI's, and Anthropic's on its routes."""
    value = context.request_id.encode("ascii")
    headers = [(b"x-request-id", value)]
    return [*headers, (b"request-id", value)] if is_anthropic(scope) else headers
