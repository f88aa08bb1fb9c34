"""HEAD requests, which clients and load balancers send to learn whether a server is there."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadMiddleware:
    """ASGI middleware that answers HEAD wherever GET is answered.

    The HTTP protocol below sends the head of the response only, with the length of its body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # A copy: the protocol reads the method of its own scope.
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)
