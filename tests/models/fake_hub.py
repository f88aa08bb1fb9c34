"""A fake hub on loopback: models as files in memory, refusals, and broken connections."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import file_download
from huggingface_hub.utils import _http

COMMIT = "a" * 40
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
MODEL = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/?]+))?(?:/tree/([^/?]+))?")


def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client retry without a pause.

    Only the client's modules get this clock: other threads of the process would spin without
    `time.sleep`.
    """
    clock = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
    for module in (file_download, _http):
        monkeypatch.setattr(module, "time", clock)


class FakeHub:
    """Fake hub and a record of its requests.

    models: id -> file name -> content.
    refusals: id -> (status, the hub's error code).
    breaks: number of connections that end after breaks_after bytes of a file.
    tokens: the authorization headers received.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.breaks = 0
        self.breaks_after = 0
        self.downloads: list[str] = []
        self.tokens: set[str | None] = set()
        self.address = ""

    @contextmanager
    def serving(self) -> Iterator["FakeHub"]:
        """Answer requests until the end of the block."""
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Handler of the hub client's requests: about a model, its tree, and its files."""

    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        """Answer with the headers of a file."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer with a file, or with a model's metadata."""
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.tokens.add(self.headers.get("Authorization"))
        of_file, of_model = FILE.fullmatch(path), MODEL.fullmatch(path)
        match = of_file or of_model
        name = match[1] if match else ""
        if name in self.hub.refusals or name not in self.hub.models:
            status, code = self.hub.refusals.get(name, (404, "RepoNotFound"))
            return self._send(status, b"{}", {"X-Error-Code": code}, with_body)
        files = self.hub.models[name]
        if of_model is not None:
            if of_model[2] not in (None, "main", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            body: Any = {"id": name, "sha": COMMIT, "siblings": _siblings(files)}
            if of_model[3] is not None:
                body = [{"type": "file", "path": one, **_blob(data)} for one, data in files.items()]
            return self._send(200, json.dumps(body).encode(), {}, with_body)
        assert of_file is not None
        if of_file[3] not in files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body)
        if with_body:
            self.hub.downloads.append(of_file[3])
        return self._send_file(files[of_file[3]], with_body)

    def _send_file(self, data: bytes, with_body: bool) -> None:
        headers = {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        begin = int((self.headers.get("Range") or "bytes=0-").split("=")[1].partition("-")[0])
        limit = self.hub.breaks_after
        if with_body and self.hub.breaks and len(data) > limit:
            self.hub.breaks -= 1
            self._head(206 if begin else 200, len(data) - begin, headers)
            self.wfile.write(data[begin : begin + limit])
            self.close_connection = True
            return
        self._send(206 if begin else 200, data[begin:], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self._head(status, len(body), headers)
        if with_body:
            self.wfile.write(body)

    def _head(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()


def _siblings(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"rfilename": name, "size": len(data)} for name, data in files.items()]


def _blob(data: bytes) -> dict[str, Any]:
    return {"oid": sha256(data).hexdigest()[:40], "size": len(data)}
