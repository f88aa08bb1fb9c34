"""The playground: a page at / that sends requests to this server and loads nothing from others."""

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
"""Permissions of the page: scripts, styles and requests of this server only."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page. path: URL path; name: file name in this folder."""

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
    """Add the routes of the page. They are not part of the API, so /openapi.json omits them."""
    for file in FILES:
        _add_file(app, file)


def _add_file(app: FastAPI, file: PageFile) -> None:
    content = files(__name__).joinpath(file.name).read_bytes()

    @app.get(file.path, include_in_schema=False)
    async def send() -> Response:
        return Response(content, media_type=file.media_type, headers=HEADERS)
