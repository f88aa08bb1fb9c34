"""The basic loops of well-known clients: each program exits with status 0 against one server.

`make test-clients` installs the clients (PyPI and npm) into build/clients and runs this.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.server import serve

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*_loop.*"))
CLIENTS = HERE.parents[1] / "build" / "clients"
TIMEOUT = 300
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the bundled model on a free port."""
    assert (CLIENTS / "node_modules").exists(), "no clients here; install them: make test-clients"
    with serve("--enable-tokenizer-info-endpoint") as address:
        yield address


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_clients_loop_runs(program: Path, url: str) -> None:
    if program.suffix == ".py":
        command = [str(CLIENTS / "venv" / "bin" / "python"), str(program), url]
    else:
        # Node looks for packages next to the program's real path.
        copy = CLIENTS / program.name
        copy.write_text(program.read_text())
        command = ["node", str(copy), url]
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, **offline}
    )
    sys.stdout.write(result.stdout)
    assert result.returncode == 0, result.stderr[-4000:]
