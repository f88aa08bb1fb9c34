"""Streams without their client, and answers that a later process goes on with."""

import asyncio
import contextlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from lockstep.errors import EngineDeadError
from lockstep.serve.app import create_app
from lockstep.serve.http.access import AccessRules
from lockstep.serve.journal import journal as journal_module
from lockstep.serve.journal.journal import Journal
from lockstep.serve.requests import resumable_streams
from lockstep.serve.requests.active_request import ActiveRequest
from lockstep.serve.requests.service import Limits, Service
from lockstep.serve.server import Options, _Server
from lockstep.serve.telemetry.metrics import Metrics
from tests.serve.api_calls import CALL, TOOLS, USER
from tests.serve.fake_client import FakeClient

KEYS = AccessRules(keys=("first", "second"))
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": USER, "tools": TOOLS, "logprobs": True, "n": 2}),
    ("/v1/completions", {"prompt": ["the", "fox"], "max_tokens": 90, "logprobs": 1, "echo": True}),
    ("/v1/messages", {"messages": USER, "max_tokens": 90}),
    ("/v1/responses", {"input": "the fox", "tools": FLAT_TOOLS}),
    ("/v1/responses", {"input": "the fox", "background": True, "top_logprobs": 2}),
]
TEXT = "Look:\n\n" + CALL


@dataclass
class Running:
    """A server process of a test: its service, its engine and its journal."""

    service: Service
    client: FakeClient
    app: Any
    journal: Journal | None

    def http(self, key: str = "first") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    def events(self) -> list[bytes]:
        """Return the events of the only stream."""
        (stream,) = self.service.streams._streams.values()
        return stream.event_log.events


@dataclass
class Servers:
    """Servers over one journal, one after the other."""

    processor: Any
    folder: Path
    opened: list[Journal] = field(default_factory=list)

    def start(
        self,
        path: Path | None = None,
        tokens: int | None = None,
        text: str = TEXT,
        seconds: float = 60.0,
        **limits: Any,
    ) -> Running:
        """Return a server. tokens: of the answer, after which the engine hangs; None for all."""
        eos = self.processor.tokenizer.fast.token_to_id("<|im_end|>")
        script = [*self.processor.tokenizer.encode(text), eos]
        client = FakeClient(lambda request: script[:tokens])
        client.step, client.hang = 2, tokens is not None
        journal = None
        if path is not None:
            journal = Journal(str(path), 1 << 20)
            journal.start({"model": "tiny"})
            self.opened.append(journal)
        bounds = Limits(resume_seconds=seconds, **limits)
        service = Service(client, self.processor, "tiny", "ls-test", bounds, journal=journal)
        return Running(service, client, create_app(service, KEYS), journal)

    def killed(self, running: Running) -> Path:
        """Return the journal as it is for the next process after a SIGKILL at this moment."""
        assert running.journal is not None
        copy = self.folder / f"copy{len(self.opened)}"
        shutil.copy(running.journal.path, copy)
        return copy


@pytest.fixture
def servers(processor: Any, tmp_path: Path) -> Iterator[Servers]:
    result = Servers(processor, tmp_path)
    yield result
    for journal in result.opened:
        journal.close()


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


async def idle() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(300):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def asked(running: Running, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the id of an answer that hangs in the middle, while its client waits."""
    async with running.http() as http:
        sent = (
            {"stream": True, "seed": 3, **body} if "messages" in body else {"stream": True, **body}
        )
        sent = {name: value for name, value in sent.items() if name != "seed" or "chat" in path}
        task = asyncio.create_task(http.post(path, json=sent))
        while not running.client.requests:
            await asyncio.sleep(0.001)
        await idle()
        (key,) = running.service.streams._streams
        try:
            yield key[1]
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def plain(stream: str) -> list[str]:
    """Return the lines of a stream without its ids and times."""
    without_id = re.sub(
        r"(chatcmpl-|cmpl-|msg_|resp_|rs_|fc_|call_|toolu_)[0-9a-f]{8,32}", r"\1", stream
    )
    without_id = re.sub(r'"(id|call_id)":"call_[^"]*"', '"id":""', without_id)
    return re.sub(r'"(created|created_at|seed)":-?\d+', r'"\1":0', without_id).splitlines()


@pytest.mark.parametrize("tokens", [4, 14])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_next_process_goes_on(
    servers: Servers, path: str, body: dict[str, Any], tokens: int
) -> None:
    """Events and their numbers are those of a server that was not killed."""

    async def work() -> None:
        first = servers.start(servers.folder / "journal", tokens)
        async with asked(first, path, body) as answer_id:
            before = list(first.events())
            assert len(before) > 2
            second = servers.start(servers.killed(first))
        await second.service.streams.restore()
        for request in second.client.requests:
            assert request.num_resumed == tokens
            assert len(request.forced_token_ids) == tokens
        async with second.http() as http:

            async def read(**options: Any) -> str:
                response = await http.get(f"{path}/{answer_id}", **options)
                assert response.status_code == 200, response.text
                return response.text

            after = f"{answer_id}:{len(before) - 1}"
            events = await read(params={"stream": True})
            rest = await read(params={"stream": True, "starting_after": len(before) - 1})
            assert await read(params={"stream": True}, headers={"Last-Event-ID": after}) == rest
            # An EventSource that comes back repeats its URL, with the number of its beginning.
            again = {"stream": True, "starting_after": 0}
            assert await read(params=again, headers={"Last-Event-ID": after}) == rest
            assert events == b"".join(before).decode() + rest and rest
            if "responses" not in path:
                posted = await http.post(
                    path, json={**body, "stream": True}, headers={"Last-Event-ID": after}
                )
                assert posted.text == rest
        assert len(second.client.requests) == len(first.client.requests), "nothing is asked again"
        assert events.count("id: ") == events.count("data: ") - events.count("data: [DONE]")
        third = servers.start()
        async with third.http() as http:
            unbroken = await http.post(path, json={**body, "stream": True})
        assert plain(events) == plain(unbroken.text)

    run(work())


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_complete_answers_are_read_from_the_journal(
    servers: Servers, path: str, body: dict[str, Any]
) -> None:
    async def work() -> None:
        first = servers.start(servers.folder / "journal")
        async with first.http() as http:
            stream = (await http.post(path, json={**body, "stream": True})).text
        answer_id = re.findall(r"id: (\S+):0\n", stream)[0]
        second = servers.start(servers.killed(first))
        await second.service.streams.restore()
        records: list[Any] = []
        second.service.on_record = (records.append,)
        async with second.http() as http, second.http("second") as other:
            url = f"{path}/{answer_id}"
            answer = await http.get(url, params={"stream": True})
            assert answer.text == stream
            as_object = await http.get(url)
            assert as_object.status_code == 200 and as_object.json()["id"] == answer_id
            assert (await other.get(url)).status_code == 404
            assert (await other.delete(url)).status_code == 404
            assert (await http.delete(url)).json()["deleted"] is True
            assert (await http.get(url)).status_code == 404
        assert not second.client.requests and not records, "nothing is generated or counted again"
        assert second.service.num_active == 0
        third = servers.start(servers.killed(second))
        async with third.http() as http:
            assert (await http.get(url, params={"stream": True})).status_code == 404

    run(work())


@pytest.mark.parametrize("is_complete", [True, False])
def test_long_saved_answers_let_other_requests_run(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    """Updates are decoded in a thread, and detokenized in parts."""
    threads: list[int] = []
    decode = journal_module.decode

    def note_thread(records: Any) -> Any:
        threads.append(threading.get_ident())
        return decode(records)

    handle = ActiveRequest._on_update
    handled = [0]

    def count(active: ActiveRequest, index: int, update: Any) -> None:
        handled[-1] += 1
        handle(active, index, update)

    async def tick() -> None:
        while True:
            handled.append(0)
            await asyncio.sleep(0)

    async def work() -> None:
        path = "/v1/completions"
        body = {"prompt": "the", "max_tokens": 400}
        first = servers.start(servers.folder / "journal", None if is_complete else 300, "a" * 400)
        first.client.step = 1
        async with asked(first, path, body) as answer_id:
            await idle()
            assert is_complete == (not first.service.num_active)
            second = servers.start(servers.killed(first), text="a" * 400)
        monkeypatch.setattr(ActiveRequest, "_on_update", count)
        monkeypatch.setattr(journal_module, "decode", note_thread)
        ticking = asyncio.create_task(tick())
        await second.service.streams.restore()
        async with second.http() as http:
            assert "[DONE]" in (await http.get(f"{path}/{answer_id}?stream=true")).text
        ticking.cancel()
        assert sum(handled) >= 300
        assert max(handled) <= 16
        assert [one == threading.get_ident() for one in threads] == [False] * is_complete

    run(work())


def test_shutdown_while_a_saved_answer_is_read_is_an_error(servers: Servers) -> None:
    """A part of a complete answer must not look like all of it."""

    async def work() -> None:
        path, body = BODIES[2]
        first = servers.start(servers.folder / "journal")
        async with first.http() as http:
            stream = (await http.post(path, json={**body, "stream": True})).text
        answer_id = re.findall(r"id: (\S+):0\n", stream)[0]
        second = servers.start(servers.killed(first))
        async with second.http() as http:
            reading = asyncio.create_task(http.get(f"{path}/{answer_id}?stream=true"))
            while not second.service.num_active:
                await asyncio.sleep(0)
            second.service.end_all()
            part = (await reading).text
        assert "shutting down" in part, "not all of the answer, without an error"
        third = servers.start(servers.killed(second))
        async with third.http() as http:
            assert (await http.get(f"{path}/{answer_id}?stream=true")).text == stream

    run(work())


def test_expired_answers_are_erased_in_time(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        running = servers.start(servers.folder / "journal", text="hello fox")
        path, body = BODIES[3]
        async with running.http() as http:
            stream = (await http.post(path, json={**body, "stream": True})).text
        answer_id = re.findall(r"id: (\S+):0\n", stream)[0].encode()
        monkeypatch.setattr(resumable_streams, "EXPIRY_SECONDS", 0.01)
        config = uvicorn.Config(running.app, log_level="error", lifespan="off")
        server = _Server(config, running.service, Metrics(""), Options(log_stats=False), None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.run_on(listener, running.client, lambda: None))
            await asyncio.sleep(0.05)
            assert answer_id in servers.killed(running).read_bytes()
            monkeypatch.setattr(journal_module, "MAX_AGE", -1.0)
            while answer_id in servers.killed(running).read_bytes():
                await asyncio.sleep(0.01)
            server.should_exit = True
            await serving

    run(work())


def test_conversations_go_on_after_a_restart(servers: Servers) -> None:
    """The second turn runs when the process is killed; the third one refers to both."""

    async def work() -> None:
        first = servers.start(servers.folder / "journal", text="hello fox")
        async with first.http() as http:
            turn = (await http.post("/v1/responses", json={"input": "the fox"})).json()
            first.client.hang = True
            first.client.answer = lambda request: servers.processor.tokenizer.encode("lazy")
            body = {"input": "next", "previous_response_id": turn["id"], "background": True}
            later = (await http.post("/v1/responses", json=body)).json()
            await idle()
        prompt = first.client.requests[1].prompt_token_ids
        second = servers.start(servers.killed(first), text="lazy dog")
        await second.service.streams.restore()
        assert second.client.requests[0].prompt_token_ids == prompt
        async with second.http() as http:
            await idle()
            ended = (await http.get(f"/v1/responses/{later['id']}")).json()
            assert (ended["status"], ended["output"][-1]["content"][0]["text"]) == (
                "completed",
                "lazy dog",
            )
            third = servers.start(servers.killed(second), text="over")
        async with third.http() as http:
            items = await http.get(f"/v1/responses/{later['id']}/input_items")
            shown = [item["content"] for item in items.json()["data"]]
            assert "hello fox" in json.dumps(shown) and len(shown) == 3
            for reference in (
                {"input": "last", "previous_response_id": later["id"]},
                {"input": [{"id": ended["output"][-1]["id"]}, {"role": "user", "content": "last"}]},
            ):
                result = await http.post("/v1/responses", json=reference)
                assert result.status_code == 200, result.text
            text = servers.processor.decode(third.client.requests[0].prompt_token_ids)
            assert "lazy dog" in text and "hello fox" in text and "last" in text
            deleted = await http.delete(f"/v1/responses/{later['id']}")
            assert deleted.json()["deleted"] is True

    run(work())


def test_errors_are_read_again(servers: Servers) -> None:
    async def work() -> None:
        first = servers.start(servers.folder / "journal", tokens=4)
        async with first.http() as http:
            body = {"messages": USER, "stream": True, "timeout": 0.05}
            stream = (await http.post("/v1/chat/completions", json=body)).text
            assert "time was up" in stream
        answer_id = re.findall(r"id: (\S+):0\n", stream)[0]
        second = servers.start(servers.killed(first))
        async with second.http() as http:
            again = await http.get(f"/v1/chat/completions/{answer_id}?stream=true")
            assert again.text == stream
            answer = await http.get(f"/v1/chat/completions/{answer_id}")
            assert answer.status_code == 504

    run(work())


def test_shutdown_leaves_answers_open(servers: Servers) -> None:
    """The last event of each stream has no new number: a reader goes on from it."""

    async def work(path: str, body: dict[str, Any]) -> None:
        folder = servers.folder / f"journal{len(servers.opened)}"
        first = servers.start(folder, tokens=14)
        async with asked(first, path, body) as answer_id:
            before = list(first.events())
            begun = asyncio.create_task(read_to_end(first, path, answer_id))
            await idle()
            first.service.end_all()
            stream = await begun
        assert stream.startswith(b"".join(before).decode())
        last = stream[len(b"".join(before)) :]
        assert "shutting down" in last and "id: " not in last
        if "responses" in path:
            assert f'"sequence_number":{len(before) - 1},' in last
        second = servers.start(servers.killed(first))
        await second.service.streams.restore()
        answer = await read_to_end(second, path, answer_id)
        assert answer.startswith(b"".join(before).decode()) and "shutting down" not in answer

    async def read_to_end(running: Running, path: str, answer_id: str) -> str:
        async with running.http() as http:
            return (await http.get(f"{path}/{answer_id}", params={"stream": True})).text

    for path, body in BODIES[3:]:
        run(work(path, body))


def test_deadline_outlives_the_process(servers: Servers) -> None:
    async def work() -> None:
        path, body = BODIES[0]
        first = servers.start(servers.folder / "journal", tokens=4)
        begun = time.time()
        async with asked(first, path, {**body, "timeout": 1.0}) as answer_id:
            (active,) = first.service._active
            second = servers.start(servers.killed(first), tokens=4)
            await second.service.streams.restore()
            (resumed,) = second.service._active
            assert active.deadline == resumed.deadline
            async with second.http() as http:
                rest = (await http.get(f"{path}/{answer_id}?stream=true")).text
        assert "the request's time was up" in rest
        assert 0.9 < time.time() - begun < 20

    run(work())


def test_engine_that_ends_leaves_answers_open(servers: Servers) -> None:
    async def work() -> None:
        first = servers.start(servers.folder / "journal", tokens=4)
        async with asked(first, *BODIES[0]):
            for active in list(first.service._active):
                active.end(EngineDeadError("the engine has stopped"))
            await idle()
        second = servers.start(servers.killed(first))
        await second.service.streams.restore()
        assert second.client.requests[0].num_resumed == 4

    run(work())


def test_stream_without_a_reader_ends_in_time(servers: Servers) -> None:
    async def work() -> None:
        running = servers.start(tokens=4, seconds=0.1)
        async with asked(running, *BODIES[0]) as answer_id:
            assert running.service.num_active == 1
        await idle()
        assert running.service.num_active == 1 and not running.client.aborted
        async with running.http() as http:
            url = f"/v1/chat/completions/{answer_id}"
            reading = asyncio.create_task(http.get(f"{url}?starting_after=0"))
            await asyncio.sleep(0.3)
            assert not reading.done() and not running.client.aborted, "a reader keeps it"
            reading.cancel()
            await asyncio.sleep(0.3)
            assert running.service.num_active == 0 and len(running.client.aborted) == 1
            gone = await http.get(f"{url}?starting_after=0")
            assert gone.status_code == 404
            assert "more than 0.1 s have passed without a reader" in gone.text

    run(work())


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_head_of_a_stream_reads_no_events(
    servers: Servers, path: str, body: dict[str, Any]
) -> None:
    """A stream that runs is no reason for HEAD to wait, and HEAD is no reader of it."""

    async def work() -> None:
        running = servers.start(tokens=4)
        async with asked(running, path, body) as answer_id, running.http() as http:
            (stream,) = running.service.streams._streams.values()
            num_readers = stream._num_readers
            head = http.head(f"{path}/{answer_id}?stream=true&starting_after=0")
            response = await asyncio.wait_for(head, 5)
            assert (response.status_code, response.content) == (200, b"")
            assert response.headers["content-type"].startswith("text/event-stream")
            assert stream._num_readers == num_readers and running.service.num_active == 1

    run(work())


def test_abandoned_streams_leave_the_journal(servers: Servers) -> None:
    async def work() -> None:
        first = servers.start(servers.folder / "journal", tokens=4, seconds=0.05)
        async with asked(first, *BODIES[0]) as answer_id:
            assert answer_id.encode() in Path(first.journal.path).read_bytes()  # type: ignore[union-attr]
        await asyncio.sleep(0.2)
        assert first.service.num_active == 0
        copy = servers.killed(first)
        assert answer_id.encode() not in copy.read_bytes(), "it is erased"

    run(work())


def test_delete_ends_a_stream(servers: Servers) -> None:
    async def work() -> None:
        running = servers.start(tokens=4)
        async with asked(running, *BODIES[3]) as answer_id, running.http() as http:
            url = f"/v1/messages/{answer_id}"
            assert (await http.delete(url)).json() == {"id": answer_id, "deleted": True}
            await idle()
            assert running.service.num_active == 0 and running.client.aborted
            gone = await http.get(f"{url}?stream=true")
            assert gone.status_code == 404 and gone.json()["error"]["type"] == "not_found_error"

    run(work())


@pytest.mark.parametrize("api", [0, 2, 3])
def test_readers_of_a_deleted_stream_get_an_error(servers: Servers, api: int) -> None:
    """Without one the answer would seem complete to another reader of it."""

    async def work() -> None:
        running = servers.start(tokens=4)
        path, body = BODIES[api]
        async with asked(running, path, body) as answer_id, running.http() as http:
            events = b"".join(running.events()).decode()
            reading = asyncio.create_task(http.get(f"{path}/{answer_id}?stream=true"))
            await idle()
            await http.delete(f"{path}/{answer_id}")
            text = (await reading).text
            assert text.startswith(events)
            last = text.removeprefix(events).removesuffix("data: [DONE]\n\n")
            assert last.count("\n\n") == 1 and "id: " not in last
            assert (
                f"{answer_id!r} was deleted"
                in json.loads(last.partition("data: ")[2])["error"]["message"]
            )
            assert ("[DONE]" in text) == ("event: error" not in text)

    run(work())


@pytest.mark.parametrize("tokens", [4, None])
@pytest.mark.parametrize("api", [0, 3, 5])
def test_number_of_no_event_is_refused(servers: Servers, tokens: int | None, api: int) -> None:
    """A client with such a number would wait for the end of the answer, and get none of it."""

    async def work() -> None:
        running = servers.start(tokens=tokens)
        path, body = BODIES[api]
        async with running.http() as http, asked(running, path, body) as answer_id:
            url = f"{path}/{answer_id}?stream=true"
            await idle()
            count = len(running.events())
            for headers in ({}, {"Last-Event-ID": f"{answer_id}:{count}"}):
                unknown = await http.get(f"{url}&starting_after={count}", headers=headers)
                assert unknown.status_code == 404
                assert f"starting_after={count} is not known: the answer has" in unknown.text
                assert f" {count} events" in unknown.text
            if tokens is None:
                known = await http.get(f"{url}&starting_after={count - 1}")
                assert (known.status_code, "data: {" in known.text) == (200, False)

    run(work())


def test_slow_answer_of_the_journal_delays_no_other(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a long answer of an earlier process takes seconds. It is read once."""
    is_read = threading.Event()
    reads: list[str] = []
    read = Journal.read

    def slow_read(journal: Journal, records: Any) -> Any:
        saved = read(journal, records)
        assert saved is not None
        reads.append(saved.request.id)
        if saved.request.id == slow_id:
            assert is_read.wait(20)
        return saved

    async def work() -> None:
        nonlocal slow_id
        path, body = BODIES[2]
        first = servers.start(servers.folder / "journal")
        async with first.http() as http:
            told = [(await http.post(path, json={**body, "stream": True})).text for _ in range(2)]
        slow_id, other_id = (re.findall(r"id: (\S+):0\n", text)[0] for text in told)
        monkeypatch.setattr(Journal, "read", slow_read)
        second = servers.start(servers.killed(first))
        async with second.http() as http:
            urls = [f"{path}/{one}?stream=true" for one in (slow_id, slow_id, other_id, "cmpl-1")]
            slow = [asyncio.create_task(http.get(url)) for url in urls[:2]]
            while not reads:
                await asyncio.sleep(0.001)
            assert (await asyncio.wait_for(http.get(urls[2]), 10)).text == told[1]
            assert (await asyncio.wait_for(http.get(urls[3]), 10)).status_code == 404
            is_read.set()
            assert [response.text for response in await asyncio.gather(*slow)] == [told[0]] * 2
        assert sorted(reads) == sorted([slow_id, other_id]), "two clients read it once"
        assert not second.service.streams._locks

    slow_id = ""
    run(work())


def test_streams_belong_to_an_api_key(servers: Servers) -> None:
    async def work() -> None:
        running = servers.start(servers.folder / "journal", tokens=4)
        path, body = BODIES[5]
        async with asked(running, path, body) as answer_id, running.http("second") as other:
            url = f"{path}/{answer_id}"
            for method, more in (("GET", ""), ("GET", "?stream=true"), ("DELETE", "")):
                assert (await other.request(method, url + more)).status_code == 404
            assert (await other.post(f"{url}/cancel")).status_code == 404
            assert (await other.get(f"{url}/input_items")).status_code == 404
            continued = {"input": "x", "previous_response_id": answer_id}
            assert (await other.post(path, json=continued)).status_code == 404
        data = Path(running.journal.path).read_bytes()  # type: ignore[union-attr]
        assert b"first" not in data and b"Bearer" not in data

    run(work())


def test_memory_of_complete_streams_is_bounded(servers: Servers) -> None:
    async def work() -> None:
        running = servers.start(max_stored_bytes=20_000)
        path, body = BODIES[0]
        async with running.http() as http:
            for _ in range(20):
                await http.post(path, json={**body, "stream": True})
        streams = running.service.streams._streams
        assert 0 < len(streams) < 20
        assert sum(one.event_log.size for one in streams.values()) <= 20_000
        assert running.service.output_budget.total_bytes == 0 and not running.service.num_active

    run(work())


def test_unread_output_ends_a_stream_without_a_reader(servers: Servers) -> None:
    async def work() -> None:
        running = servers.start(max_output_bytes=500)
        path, body = BODIES[0]
        async with running.http() as http:
            stream = (await http.post(path, json={**body, "stream": True})).text
        assert "answer_not_read" in stream

    run(work())


def test_power_loss_makes_later_events_uncertain(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The number of an event that may have been another one is refused, and an earlier one not."""

    async def work() -> None:
        first = servers.start(servers.folder / "journal", tokens=4)
        path, body = BODIES[0]
        async with asked(first, path, body) as answer_id:
            count = len(first.events())
        boot = tmp_path / "boot"
        boot.write_text("another")
        monkeypatch.setattr("lockstep.serve.journal.journal._BOOT_ID", boot)
        second = servers.start(servers.killed(first))
        await second.service.streams.restore()
        async with second.http() as http:
            url = f"{path}/{answer_id}"
            known = await http.get(f"{url}?starting_after={count - 1}")
            assert known.status_code == 200 and "[DONE]" in known.text
            unknown = await http.get(f"{url}?starting_after={count}")
            assert unknown.status_code == 404 and f"only the first {count} events" in unknown.text

    run(work())


@pytest.mark.parametrize(
    ("url", "headers", "status", "message"),
    [
        ("/v1/chat/completions/chatcmpl-1?starting_after=1", {}, 404, "--journal or --resume"),
        ("/v1/completions/cmpl-1", {}, 404, "--journal or --resume-timeout"),
        ("/v1/messages/msg_1?stream=true", {}, 404, "--journal or --resume-timeout"),
        ("/v1/chat/completions/chatcmpl-1?starting_after=-1", {}, 400, "starting_after"),
        ("/v1/chat/completions/chatcmpl-1", {"Last-Event-ID": "5"}, 400, "id of an event"),
        ("/v1/chat/completions/chatcmpl-1", {"Last-Event-ID": "chatcmpl-2:5"}, 400, "of another"),
    ],
)
def test_unavailable_events_are_a_clear_error(
    servers: Servers, url: str, headers: dict[str, str], status: int, message: str
) -> None:
    async def work() -> None:
        running = servers.start(seconds=0.0)
        async with running.http() as http:
            response = await http.get(url, headers=headers)
            assert (response.status_code, message in response.text) == (status, True), response.text
            body = {"messages": USER, "stream": True}
            posted = await http.post(
                "/v1/chat/completions", json=body, headers={"Last-Event-ID": "chatcmpl-1:3"}
            )
            assert posted.status_code == 404 and not running.client.requests
            stream = await http.post("/v1/chat/completions", json=body)
            assert "id: " not in stream.text, "an id would promise that the stream can be resumed"

    run(work())
