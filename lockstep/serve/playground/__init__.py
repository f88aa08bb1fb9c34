"""The playground: one page at / that asks this server, with nothing fetched from elsewhere."""

from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a browser lets the page do: its own script and style, and requests to this server."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page: where it is served, its name in this folder, its media type."""

    path: str
    name: str
    media_type: str


FILES = (
    PageFile("/", "index.html", "text/html"),
    PageFile("/playground/app.css", "app.css", "text/css"),
    PageFile("/playground/app.js", "app.js", "text/javascript"),
    PageFile("/playground/markdown.js", "markdown.js", "text/javascript"),
)


def add_playground(app: FastAPI) -> None:
    """Routes of the page. They are no part of the API, so the schema does not name them."""
    for file in FILES:
        _add_file(app, file)


def _add_file(app: FastAPI, file: PageFile) -> None:
    content = files(__name__).joinpath(file.name).read_bytes()

    @app.get(file.path, include_in_schema=False)
    async def send() -> Response:
        return Response(content, media_type=file.media_type, headers=HEADERS)
