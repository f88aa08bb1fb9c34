"""Server of the bundled model as a separate process, on a TCP port of loopback."""

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from tests.ports import free_port

START_TIMEOUT = 300.0
"""Seconds that a server may take to answer /health."""


@contextlib.contextmanager
def serve(*options: str) -> Iterator[str]:
    """Yield the base URL of a server that answers; end it afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "lockstep", "serve", "--port", str(port), *options]
    command += ["--served-model-name", "lockstep"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_healthy(url):
            assert server.poll() is None, "the server ended before it answered"
            assert time.monotonic() < deadline, f"no answer within {START_TIMEOUT} s"
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            raise


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
