"""Hub requests time out after seconds, and downloaded models are served without the hub."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from lockstep.errors import ConfigError
from lockstep.models import hub
from lockstep.worker.build import find_model
from tests.models.fake_hub import retry_at_once


def hang(*_: Any, **__: Any) -> None:
    """Never answer, as a network that drops all packets."""
    time.sleep(30)


def unreachable(*_: Any, **__: Any) -> None:
    """Raise, as a network that is down."""
    raise ConnectionError("no route to host\nand much more")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache of the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def make_snapshot(cache: Path, name: str) -> Path:
    """Write a model as the hub's client caches it."""
    home = cache / f"models--{name.replace('/', '--')}"
    commit = "a" * 40
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    return snapshot


COMMIT = "a" * 40
CONFIG = b'{"model_type": "none"}'


class Stalling(BaseHTTPRequestHandler):
    """Hub with one model of one file, of which it sends half."""

    seen: list[str]
    finished: threading.Event

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self._head(len(CONFIG))

    def do_GET(self) -> None:
        if "/resolve/" not in self.path:
            received: Any = {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}
            if "/tree/" in self.path:
                mine = {"type": "file", "oid": "b" * 40, "size": len(CONFIG), "path": "config.json"}
                received = [mine]
            body = json.dumps(received).encode()
            self._head(len(body))
            self.wfile.write(body)
            return
        self.seen.append(self.path)
        self._head(len(CONFIG))
        self.wfile.write(CONFIG[: len(CONFIG) // 2])
        self.wfile.flush()
        self.finished.wait(20)

    def _head(self, size: int) -> None:
        self.send_response(200)
        self.send_header("ETag", '"' + "b" * 40 + '"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(size))
        self.end_headers()


@pytest.fixture
def stalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the requests for the file of a stalling hub, with short client timeouts."""
    seen: list[str] = []
    finished = threading.Event()
    handler = type("Handler", (Stalling,), {"seen": seen, "finished": finished})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    retry_at_once(monkeypatch)
    yield seen
    finished.set()
    server.shutdown()
    server.server_close()


def test_stalled_download_times_out(stalling: list[str]) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"\('config.json' stalled: .*ask again.*Name a folder"):
        find_model("a/b")
    assert len(stalling) == 6 and time.monotonic() - begin < 10


def test_unresponsive_hub_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hang)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="not answer within 3 seconds.*Name a folder"):
        find_model("someone/something")
    assert time.monotonic() - begin < hub.HUB_SECONDS + 2


def test_network_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ConfigError, match=r"no route to host\).*Name a folder") as caught:
        find_model("someone/something")
    assert "\n" not in str(caught.value)


def test_missing_gguf_file_is_named_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is also that of a hub id."""
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ConfigError, match="neither an existing folder or GGUF file, nor a hub id"):
        find_model("folder/model.gguf")


def test_cached_model_serves_without_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    snapshot = make_snapshot(cache, "someone/something")
    assert find_model("someone/something") == snapshot


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "x" * 5000, "a\0b", "a b"])
def test_invalid_model_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="Name a folder") as caught:
        find_model(name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (None, ["*.safetensors"]),
        ('{"weight_map": {"a": 5}}', ["*.safetensors"]),
        (
            '{"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors"}}',
            ["m-1.safetensors", "m-2.safetensors", "model_extra_tensors.safetensors"],
        ),
    ],
)
def test_only_indexed_weights_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: str | None, expected: list[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def download(model: str, **options: Any) -> str:
        calls.append(options)
        if index is not None:
            (tmp_path / "model.safetensors.index.json").write_text(index)
        return str(tmp_path)

    monkeypatch.setattr(hub, "_query_hub", lambda model: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch("a/b") == tmp_path
    assert calls[0]["allow_patterns"] == ["*.json", "*.jinja"]
    assert calls[1]["allow_patterns"] == expected
    assert calls[1]["ignore_patterns"] == ["*/*.safetensors"]
