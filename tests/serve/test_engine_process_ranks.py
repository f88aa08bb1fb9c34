"""The server over several ranks and nodes from outside: kills, restarts, the end."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forked_processes import second_rank
from tests.ports import free_port
from tests.serve.server_process import COMMAND, PATIENCE, engine_of, is_gone, served
from tests.serve.test_engine_process import completion_text, watch_restart
from tests.waiting import wait_until

BODY: dict[str, Any] = {"prompt": "def read(path):", "max_tokens": 20, "temperature": 0}
SIZES = ["--max-model-len", "512", "--max-num-seqs", "2", "--speculative-config", "none"]

pytestmark = pytest.mark.slow


def test_an_idle_server_notices_a_dead_rank(tmp_path: Path) -> None:
    with served(tmp_path / "s", *SIZES, "-tp", "2") as (running, client):
        expected = completion_text(client, BODY)
        began = time.monotonic()
        os.kill(second_rank(engine_of(running)), signal.SIGKILL)
        wait_until(lambda: client.get("/health").status_code != 200)
        assert time.monotonic() - began < 5
        watch_restart(client)
        assert completion_text(client, BODY) == expected
        engine = engine_of(running)
        rank = second_rank(engine)
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0
        wait_until(lambda: is_gone(engine) and is_gone(rank))


def node(port: int) -> subprocess.Popen[str]:
    """Start the second node, by a command line as for vLLM."""
    options = ["--nnodes", "2", "--node-rank", "1", "--master-port", str(port), "--headless"]
    command = [*COMMAND, *SIZES, "-tp", "2", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_a_server_of_two_nodes_survives_the_end_of_either(tmp_path: Path) -> None:
    """The node outlives an engine of the head, and the head waits for another node."""
    port = free_port()
    options = ["-tp", "2", "--nnodes", "2", "--master-port", str(port)]
    second = node(port)
    try:
        with served(tmp_path / "s", *SIZES, *options) as (running, client):
            expected = completion_text(client, BODY)
            os.kill(engine_of(running), signal.SIGKILL)
            wait_until(lambda: client.get("/health").status_code != 200)
            watch_restart(client)
            assert completion_text(client, BODY) == expected
            second.kill()
            second.communicate()
            wait_until(lambda: client.get("/health").status_code != 200)
            second = node(port)
            watch_restart(client)
            assert completion_text(client, BODY) == expected
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE) == 0
            assert second.wait(20) == 0
            assert second.stderr is not None
            assert "node 1 of 2: the head has ended" in second.stderr.read()
    finally:
        second.kill()
        second.communicate()


def test_a_server_names_a_node_that_differs(tmp_path: Path) -> None:
    port = free_port()
    second = node(port)
    command = [*COMMAND, *SIZES, "--max-num-seqs", "3", "-tp", "2", "--nnodes", "2"]
    command += ["--master-port", str(port), "--uds", str(tmp_path / "s")]
    try:
        head = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        expected = "max_num_seqs of rank 1 of 2 on node 1 (127.0.0.1) is 2, and of rank 0 3"
        assert head.returncode == 2 and f"ConfigError: {expected}" in head.stderr
        assert second.wait(20) == 2
        assert second.stderr is not None and expected in second.stderr.read()
    finally:
        second.kill()
        second.communicate()
