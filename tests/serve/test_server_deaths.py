"""Streams of all APIs while their server process is killed: clients come back for the rest."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.errors import ConfigError
from tests.forked_processes import ForkedProgram
from tests.serve.live_server import CALL, TOOLS
from tests.serve.server_process import PATIENCE, _listens
from tests.serve.test_engine_deaths import FLAT_TOOLS, GREEDY, OPTIONS, VARYING, usage_of

LONG = {"prompt": "def read(path):", "max_tokens": 160, "temperature": 1.0, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**LONG, "logprobs": 2, "seed": 1}),
    ("/v1/chat/completions", {"messages": CALL, "tools": TOOLS, "max_tokens": 60, "seed": 2}),
    ("/v1/responses", {"input": CALL, "tools": FLAT_TOOLS, "max_output_tokens": 60, **GREEDY}),
    ("/v1/messages", {"messages": CALL, "max_tokens": 60, **GREEDY}),
    ("/v1/completions", {**LONG, "n": 2, "stop": ["zzz"], "seed": 3}),
    ("/v1/responses", {"input": "Count to 40.", "background": True, **GREEDY}),
    (
        "/v1/completions",
        {
            "prompt": "def",
            "max_tokens": 300,
            "seed": 4,
            "structured_outputs": {"regex": "[a-f]{4}(-[0-9]{3}){15}"},
        },
    ),
]
KILL_SECONDS = 12.0
"""Seconds between the starts of two processes, where they serve soon enough."""
SERVED_SECONDS = 3.0
"""Least seconds for which a process serves before it is killed."""
MIN_KILLS = 4
SERVER = """
import sys
from lockstep.__main__ import main
from tests.forked_processes import fork_engines

fork_engines()
sys.argv = ["lockstep", *sys.argv[1:]]
main()
"""


class Server:
    """Server on a Unix socket that is killed and started again, with the same journal.

    is_forked: start it from a process with all imports, which takes less time.
    """

    def __init__(self, folder: Path, is_forked: bool) -> None:
        self.socket = folder / "s"
        self.journal = folder / "journal"
        self.log = folder / "log"
        self.is_forked = is_forked
        self.process: subprocess.Popen[bytes] | ForkedProgram | None = None

    def start(self) -> None:
        """Start the process; clients that connect early wait for the model."""
        options = ["serve", "--uds", str(self.socket), *OPTIONS]
        options += ["--journal", str(self.journal), "--journal-size", "8M"]
        if self.is_forked:
            self.process = ForkedProgram(SERVER, options)
        else:
            command = [sys.executable, "-m", "lockstep", *options]
            with self.log.open("a") as log:
                self.process = subprocess.Popen(command, stderr=log, start_new_session=True)
        deadline = time.monotonic() + PATIENCE
        while not _listens(self.socket):
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def errors(self) -> str:
        """Return what a process that has ended wrote to stderr."""
        if isinstance(self.process, ForkedProgram):
            return self.process.stderr.read()
        return self.log.read_text()

    def kill(self) -> None:
        """Kill the server as the memory killer does; its engine notices that and ends."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE)
        self.close_pipes()

    def close_pipes(self) -> None:
        """Close the pipes of a forked process that has ended; its engine may still have them."""
        if isinstance(self.process, ForkedProgram):
            self.process.stdout.close()
            self.process.stderr.close()

    def client(self) -> httpx.AsyncClient:
        """Return a client of the present process and of the next ones."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket))
        return httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=4 * PATIENCE
        )


@contextlib.contextmanager
def started(folder: Path, is_forked: bool = True) -> Iterator[Server]:
    """Yield a running server."""
    server = Server(folder, is_forked)
    server.start()
    try:
        yield server
    finally:
        server.kill()


class Reader:
    """Client that reads a stream to its end, over any number of connections."""

    def __init__(self, client: httpx.AsyncClient, number: int) -> None:
        self.client = client
        self.path, self.body = REQUESTS[number % len(REQUESTS)]
        self.events: list[dict[str, Any]] = []
        self.last_id: str | None = None
        self.num_breaks = 0

    async def read(self) -> Any:
        """Return what the stream says, in a form that does not depend on ids and drafts."""
        while not await self._read_once():
            self.num_breaks += 1
            await asyncio.sleep(0.05)
        return joined(self.events)

    async def _read_once(self) -> bool:
        """Read until the stream ends or breaks, and return whether it has ended."""
        if self.last_id is None:
            request = self.client.stream("POST", self.path, json={**self.body, "stream": True})
        else:
            url = f"{self.path}/{self.last_id.rpartition(':')[0]}?stream=true"
            request = self.client.stream("GET", url, headers={"Last-Event-ID": self.last_id})
        try:
            async with request as response:
                if response.status_code != 200:
                    raise AssertionError((await response.aread()).decode())
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        expected = (
                            0 if self.last_id is None else int(self.last_id.split(":")[-1]) + 1
                        )
                        assert int(line.rpartition(":")[2]) == expected, "no event twice, none lost"
                        self.last_id = line[4:]
                    elif line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                return True
        except httpx.TransportError:
            return False


def joined(events: list[dict[str, Any]]) -> Any:
    """Return the texts of a stream by kind, and its last event."""
    texts: dict[str, str] = {}
    scores: list[Any] = []
    for event in events:
        assert "error" not in event, event
        for choice in event.get("choices", ()):
            place = f"choice {choice['index']}"
            delta = choice.get("delta") or {}
            text = (choice.get("text") or "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                text += (function.get("name") or "") + (function.get("arguments") or "")
            texts[place] = texts.get(place, "") + text + (choice["finish_reason"] or "")
            if entry := choice.get("logprobs"):
                scores += zip(entry["tokens"], entry["token_logprobs"], strict=True)
        if isinstance(delta := event.get("delta"), str):
            texts["delta"] = texts.get("delta", "") + delta
        elif isinstance(delta, dict):
            for name in ("text", "partial_json"):
                texts[name] = texts.get(name, "") + (delta.get(name) or "")
    last = events[-1].get("response", {}).get("output")
    return texts, scores, _stable(last)


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stable(item) for name, item in value.items() if name not in VARYING}
    return [_stable(item) for item in value] if isinstance(value, list) else value


async def is_healthy(client: httpx.AsyncClient) -> bool:
    """Return whether a server answers that its engine runs."""
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def expected_answers(server: Server) -> list[Any]:
    async with server.client() as client:
        readers = [Reader(client, number) for number in range(len(REQUESTS))]
        return list(await asyncio.gather(*(reader.read() for reader in readers)))


def test_answers_survive_the_death_of_their_server(tmp_path: Path) -> None:
    """Kill the server in the middle of one stream of each kind, and before any stream begins."""
    with started(tmp_path) as server:

        async def work() -> None:
            expected = await expected_answers(server)
            async with server.client() as client:
                readers = [Reader(client, number) for number in range(len(REQUESTS))]
                tasks = [asyncio.create_task(reader.read()) for reader in readers]
                while not all(reader.last_id for reader in readers):
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                for actual, plain, reader in zip(
                    await asyncio.gather(*tasks), expected, readers, strict=True
                ):
                    assert actual == plain, reader.path
                assert sum(reader.num_breaks for reader in readers) >= 2
                response_id = (readers[5].last_id or "").partition(":")[0]
                again = await client.get(f"/v1/responses/{response_id}")
                assert again.json()["status"] == "completed"

        asyncio.run(work())
        assert os.stat(server.journal).st_mode & 0o777 == 0o600
        other = CliRunner().invoke(app, ["serve", "--port", "0", "--journal", str(server.journal)])
        assert isinstance(other.exception, ConfigError)
        assert "is in use by another process" in str(other.exception)


@pytest.mark.slow
def test_twenty_streams_while_the_server_is_killed_again_and_again(tmp_path: Path) -> None:
    """For a minute and more: no error, no other answer, and the server's memory stays flat."""
    seconds, num_streams = 75.0, 20
    with started(tmp_path, is_forked=False) as server:
        expected = asyncio.run(expected_answers(server))
        actual: list[tuple[int, Any]] = []
        usages: list[tuple[int, int]] = []
        num_breaks = 0
        is_killing = True

        async def work() -> None:
            nonlocal is_killing
            end = time.monotonic() + seconds

            async def ask(client: httpx.AsyncClient, number: int) -> None:
                nonlocal num_breaks
                while is_killing:
                    reader = Reader(client, number)
                    actual.append((number % len(REQUESTS), await reader.read()))
                    num_breaks += reader.num_breaks
                    number += num_streams

            async with server.client() as client:
                tasks = [asyncio.create_task(ask(client, n)) for n in range(num_streams)]
                while time.monotonic() < end or len(usages) < MIN_KILLS:
                    due = time.monotonic() + KILL_SECONDS
                    while not await is_healthy(client):
                        await asyncio.sleep(0.1)
                    await asyncio.sleep(max(due - time.monotonic(), SERVED_SECONDS))
                    assert server.process is not None
                    usages.append(usage_of(server.process.pid))
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                is_killing = False
                await asyncio.gather(*tasks)

        asyncio.run(work())
        different = [(n, answer) for n, answer in actual if answer != expected[n]]
        print(
            f"{len(actual)} streams, {len(usages)} kills, {num_breaks} broken connections, "
            f"{len(different)} different answers; (descriptors, resident KiB) before each kill: "
            f"{usages}"
        )
        assert not different, different[0]
        assert num_breaks > len(usages)
        descriptors, memory = zip(*usages, strict=True)
        assert max(descriptors) <= min(descriptors) + num_streams + 5
        assert max(memory) < min(memory) + (64 << 10)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_sigterm_leaves_answers_for_the_next_process(tmp_path: Path) -> None:
    """A rolling restart with --shutdown-timeout 0."""
    with started(tmp_path) as server:

        async def work() -> None:
            async with server.client() as client:
                body = {"input": "Count to 40.", "background": True, **GREEDY}
                plain = (
                    await client.post("/v1/responses", json={**body, "background": False})
                ).json()
                begun = (await client.post("/v1/responses", json=body)).json()
                assert server.process is not None
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.process.wait, PATIENCE)
                server.close_pipes()
                await asyncio.to_thread(server.start)
                url = f"/v1/responses/{begun['id']}"
                while (answer := (await client.get(url)).json())["status"] != "completed":
                    assert answer["status"] in ("queued", "in_progress"), answer
                    await asyncio.sleep(0.05)
                assert _stable(answer["output"]) == _stable(plain["output"])

        asyncio.run(work())
