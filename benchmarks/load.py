"""Load test of the server: no request lost, no resource leaked, no answer changed.

    python benchmarks/load.py [--requests 2000] [--seconds 0] [--streams 200] [--json] [-- OPTIONS]

OPTIONS are those of serve. Starts `lockstep serve` with the bundled model and sends --streams
concurrent requests for texts, chats, tools and grammars. Some clients disconnect at any moment,
some bodies are malformed or too large, and some prompts are too long. Then it checks that:

- every request got its complete answer, or the expected error
- rows, pages, tasks and sockets are back at their numbers before the load
- the memory of the server and of its engine's process is flat after the first fifth of the run
- /health always answered within HEALTH_MS; a separate process requests it
- with OVERHEAD_STREAMS streams, a request took at most OVERHEAD_MS (p99) longer than the engine
  needed for it, up to the last byte of its answer; the client that is timed does not parse
- the tokens of COMPARED answers equal those of LLM.generate, one request at a time, with drafts

Exits with status 1 if a check fails.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep import LLM, SamplingParams
from lockstep.bench.measurement import children_of, cpu_seconds, percentile, start_server

HEALTH_MS = 100.0
"""Limit of the latency of /health."""
HEALTH_SECONDS = 0.05
"""Seconds between two requests for /health."""
OVERHEAD_MS = 5.0
"""Limit of the time of a request beyond the engine's, p99."""
OVERHEAD_STREAMS = 32
OVERHEAD_ROUNDS = 21
OVERHEAD_TOKENS = (32, 97)
"""Range of answer lengths; different lengths spread the ends of requests."""
GROWTH = 0.05
"""Limit, as a share, of memory growth from the end of the first fifth of a run to its end."""
COMPARED = 100
"""Answers that are compared with LLM.generate."""
RAMP_SECONDS = 5.0
"""Seconds over which the streams of a load start."""
PATIENCE = 600.0
"""Timeout of an answer, in seconds."""
SETTLE_SECONDS = 30.0
"""Time limit for the server to release the resources of a load."""
MODEL_LEN = 4096
ROWS = 32
PAGES = 400
"""Pages of the cache, few enough that all are touched soon: untouched memory is not resident."""
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
COMMAND = """
import asyncio, signal, sys, threading
POOLS = ("asyncio_", "ThreadPoolExecutor", "lockstep-compile", "lockstep-body")
def log_tasks(*_):
    pooled = sum(thread.name.startswith(POOLS) for thread in threading.enumerate())
    print(f"tasks {len(asyncio.all_tasks())} pooled {pooled}", file=sys.stderr, flush=True)
signal.signal(signal.SIGUSR1, log_tasks)
from lockstep.__main__ import main
main()
"""
"""The command with a signal handler that logs the number of tasks and of pool threads.

Pools are those of asyncio or uvloop, of grammar compilation, and of large bodies. They grow on
demand up to a limit and keep their threads.
"""


# Requests.

TEXTS = (
    "def read(path):",
    "1, 2, 3,",
    "Once upon a time",
    "import os\n\n\ndef main(",
    "SELECT owner FROM",
    "The clock on the square",
)
OWNERS = ("Zorin", "Tavoli", "Kelmar", "Bosan", "Ferdo")
TOOL = {
    "type": "function",
    "function": {
        "name": "find_record",
        "description": "Find the record",
        "parameters": {
            "type": "object",
            "properties": {"owner": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["owner", "limit"],
        },
    },
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f]{8,40}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
)
BROKEN = (
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": 5}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
    b"[" * 100_000,
)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LAST_BYTES = b"data: [DONE]\n\n\r\n0\r\n\r\n"
"""End of a complete stream: its last event and the last chunk of the HTTP body."""


@dataclass(frozen=True)
class Ask:
    """Request with its expected outcome.

    kind: name of the kind of request, for the report. status: expected HTTP status.
    disconnect_after: events until the client disconnects; -1: within the body, None: never.
    claimed: Content-Length if it differs from the body's length.
    alone: returns the tokens that LLM.generate gives.
    """

    kind: str
    path: str
    body: bytes
    status: int = 200
    disconnect_after: int | None = None
    claimed: int | None = None
    alone: Callable[[LLM], list[int]] | None = None

    @property
    def streams(self) -> bool:
        """Return whether the answer is a stream of events."""
        return b'"stream": true' in self.body


def _sampling_fields(rng: random.Random) -> dict[str, Any]:
    """Return sampling parameters with a fixed seed."""
    return {
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 0.9)),
        "seed": rng.randrange(1 << 31),
        "max_tokens": rng.randrange(16, 160),
    }


def _json_body(fields: dict[str, Any], stream: bool = True) -> bytes:
    """Return the JSON body of a request."""
    return json.dumps({**fields, "stream": stream, "return_token_ids": True}).encode()


def completion(rng: random.Random, **more: Any) -> Ask:
    """Return a text completion."""
    prompt = f"{rng.choice(TEXTS)} {rng.randrange(1000)}"
    fields = _sampling_fields(rng) | more

    def alone(llm: LLM) -> list[int]:
        return llm.generate(prompt, SamplingParams(**fields))[0].outputs[0].token_ids

    body = _json_body({"prompt": prompt, **fields}, rng.random() < 0.7)
    return Ask("completion", COMPLETIONS, body, alone=alone)


def grammar(rng: random.Random) -> Ask:
    """Return a completion with a grammar."""
    request = completion(rng, structured_outputs=rng.choice(GRAMMARS))
    return Ask("grammar", request.path, request.body, alone=request.alone)


def long_prompt(rng: random.Random) -> Ask:
    """Return a completion of a long prompt with a short answer."""
    prompt = " ".join(f"{rng.choice(OWNERS)} {rng.randrange(1000)}" for _ in range(300))
    fields = _sampling_fields(rng) | {"max_tokens": 8}

    def alone(llm: LLM) -> list[int]:
        return llm.generate(prompt, SamplingParams(**fields))[0].outputs[0].token_ids

    return Ask("long prompt", COMPLETIONS, _json_body({"prompt": prompt, **fields}), alone=alone)


def tools(rng: random.Random) -> Ask:
    """Return a chat whose answer is a tool call."""
    text = f"Find the record where owner is {rng.choice(OWNERS)} and limit is {rng.randrange(40)}."
    messages = [{"role": "user", "content": text}]
    fields = _sampling_fields(rng) | {"max_tokens": 80}

    def alone(llm: LLM) -> list[int]:
        params = SamplingParams(**fields)
        return llm.chat(messages, params, tools=[TOOL])[0].outputs[0].token_ids

    return Ask(
        "tools", CHAT, _json_body({"messages": messages, "tools": [TOOL], **fields}), alone=alone
    )


def required(rng: random.Random) -> Ask:
    """Return a chat that must call a tool."""
    request = tools(rng)
    return Ask("required", CHAT, request.body[:-1] + b', "tool_choice": "required"}')


def several(rng: random.Random) -> Ask:
    """Return a request for several completions of one prompt."""
    fields = {"prompt": rng.choice(TEXTS), **_sampling_fields(rng), "n": rng.randrange(2, 4)}
    return Ask("several", COMPLETIONS, _json_body(fields))


def leaver(rng: random.Random) -> Ask:
    """Return a streamed request whose client disconnects before or after some events."""
    request = rng.choice((completion, grammar, tools, several, long_prompt))(rng)
    body = request.body.replace(b'"stream": false', b'"stream": true')
    return Ask("leaver", request.path, body, disconnect_after=rng.choice((0, 0, 1, 2, 5, 20)))


def half(rng: random.Random) -> Ask:
    """Return a request whose client disconnects in the middle of the body."""
    request = completion(rng)
    return Ask("half a body", request.path, request.body, disconnect_after=-1)


def broken(rng: random.Random) -> Ask:
    """Return a malformed body."""
    return Ask("broken body", rng.choice((COMPLETIONS, CHAT)), rng.choice(BROKEN), status=400)


def huge(rng: random.Random) -> Ask:
    """Return a prompt with too many tokens or characters."""
    prompt: Any = [5] * (MODEL_LEN + 1) if rng.random() < 0.5 else "word " * 1_000_000
    return Ask("huge prompt", COMPLETIONS, json.dumps({"prompt": prompt}).encode(), status=400)


def oversized(rng: random.Random) -> Ask:
    """Return a request whose Content-Length exceeds the limit; the body itself is not sent."""
    return Ask("huge body", COMPLETIONS, b"{", status=413, claimed=1 << 30)


KINDS: tuple[tuple[Callable[[random.Random], Ask], int], ...] = (
    (completion, 40),
    (grammar, 10),
    (long_prompt, 4),
    (tools, 10),
    (required, 4),
    (several, 4),
    (leaver, 15),
    (half, 3),
    (broken, 6),
    (huge, 3),
    (oversized, 1),
)
"""(function, share) of every kind of request."""


def draw(number: int) -> Ask:
    """Return the request of a number, which is always the same."""
    rng = random.Random(number)
    makers = [maker for maker, _ in KINDS]
    return rng.choices(makers, [share for _, share in KINDS])[0](rng)


def requests_until(requests: int, seconds: float) -> Iterator[Ask]:
    """Yield at least `requests` requests, and more until `seconds` have passed since the first."""
    until = time.monotonic() + seconds
    for number in count():
        if number >= requests and time.monotonic() >= until:
            return
        yield draw(number)


# Clients.


@dataclass
class Outcome:
    """Outcome of a request.

    request_id: its X-Request-Id. seconds: from its first byte to the last byte of the answer.
    fault: difference from the expected outcome, None if it is as expected.
    """

    ask: Ask
    request_id: str
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    fault: str | None = None


def _head(ask: Ask, request_id: str, connection: str = "close") -> bytes:
    """Return the HTTP request head."""
    length = len(ask.body) if ask.claimed is None else ask.claimed
    head = (
        f"POST {ask.path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        f"X-Request-Id: {request_id}\r\n\r\n"
    )
    return head.encode()


async def send(path: str, ask: Ask, request_id: str) -> Outcome:
    """Send a request on a new connection and judge the answer."""
    outcome = Outcome(ask, request_id)
    began = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                await _talk(reader, writer, outcome)
            finally:
                writer.transport.abort()
    except Exception as error:
        outcome.fault = f"{type(error).__name__}: {error}"
    outcome.seconds = time.monotonic() - began
    return outcome


async def _talk(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outcome: Outcome
) -> None:
    """Write a request and read its answer into the outcome."""
    ask = outcome.ask
    head = _head(ask, outcome.request_id)
    body = ask.body[: len(ask.body) // 2] if ask.disconnect_after == -1 else ask.body
    writer.write(head + body)
    await writer.drain()
    if ask.disconnect_after == -1:
        return
    line = await reader.readline()
    status = int(line.split()[1])
    if status != ask.status:
        rest = (await reader.read())[-300:]
        outcome.fault = f"status {status}, not {ask.status}: {rest!r}"
        return
    if status == 200 and ask.streams:
        await _read_events(reader, outcome)
        return
    answer = await reader.read()
    if status == 200:
        _read_whole(json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1]), outcome)


async def _read_events(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    """Read a stream until the client disconnects or the stream ends."""
    num_events = outcome.ask.disconnect_after
    seen = 0
    reasons: dict[int, str] = {}
    last = b""
    async for event in _events(reader):
        if num_events is not None and seen >= num_events:
            return
        seen += 1
        last = event
        if last != b"[DONE]":
            _read_event(json.loads(last), outcome, reasons)
    if num_events is None:
        _judge_end(outcome, reasons, last == b"[DONE]")


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of events; skip the lines of chunks and of the response head."""
    begun = b""
    while block := await reader.read(1 << 16):
        *lines, begun = (begun + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].strip()


def _read_event(event: dict[str, Any], outcome: Outcome, reasons: dict[int, str]) -> None:
    """Add an event to the outcome, and finish reasons to `reasons` by choice."""
    if "error" in event:
        outcome.fault = f"in the stream: {event['error']}"
    for choice in event.get("choices", ()):
        if choice["index"] == 0:
            outcome.tokens += choice.get("token_ids") or ()
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]


def _read_whole(answer: dict[str, Any], outcome: Outcome) -> None:
    """Read an answer that is not streamed."""
    reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    outcome.tokens = answer["choices"][0]["token_ids"]
    _judge_end(outcome, reasons, True)


def _judge_end(outcome: Outcome, reasons: dict[int, str], done: bool) -> None:
    """Set the fault of an answer that is incomplete or has an unexpected finish reason."""
    fields = json.loads(outcome.ask.body)
    if not done or len(reasons) != fields.get("n", 1):
        outcome.fault = outcome.fault or f"the answer broke off: {reasons}, [DONE]: {done}"
    elif not set(reasons.values()) <= {"stop", "length", "tool_calls"}:
        outcome.fault = outcome.fault or f"it ended with {reasons}"


def name_of(number: int) -> str:
    """Return the request id of a number."""
    return f"load-{number}"


class TimingClient:
    """Client that keeps connections alive and measures the time to the last byte of each answer.

    It does not parse answers, so that its work adds next to nothing to that time.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, path: str, ask: Ask, request_id: str) -> Outcome:
        """Send a request on an idle connection, or on a new one."""
        outcome = Outcome(ask, request_id)
        began = time.monotonic()
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_unix_connection(path)
        writer.write(_head(ask, request_id, "keep-alive") + ask.body)
        tail = b""
        while tail != LAST_BYTES:
            block = await reader.read(1 << 16)
            if not block:
                raise RuntimeError(f"{request_id} broke off after {tail!r}")
            tail = (tail + block)[-len(LAST_BYTES) :]
        outcome.seconds = time.monotonic() - began
        self._idle.append((reader, writer))
        return outcome

    async def send_all(self, path: str, asks: Iterable[Ask], streams: int) -> list[Outcome]:
        """Send all requests with `streams` at a time, then close the connections."""
        outcomes = await send_all(path, asks, streams, lambda done: None, self.send)
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()
        return outcomes


Send = Callable[[str, Ask, str], Coroutine[Any, Any, Outcome]]


async def send_all(
    path: str,
    asks: Iterable[Ask],
    streams: int,
    show: Callable[[int], None],
    send: Send = send,
) -> list[Outcome]:
    """Send all requests with `streams` at a time; return their outcomes."""
    outcomes: list[Outcome] = []
    numbered = enumerate(asks)

    async def work(index: int) -> None:
        await asyncio.sleep(RAMP_SECONDS * index / streams)
        for number, ask in numbered:
            outcomes.append(await send(path, ask, name_of(number)))
            show(len(outcomes))

    await asyncio.gather(*(work(index) for index in range(streams)))
    return outcomes


# Observers.


def ask_health(path: str, connection: Connection) -> None:
    """Request /health until a message arrives, then send the seconds of each request.

    Runs in a separate process, so that the load does not delay it.
    """
    times: list[float] = []
    while not connection.poll(HEALTH_SECONDS):
        began = time.monotonic()
        answer = _get(path, "/health")
        times.append(time.monotonic() - began)
        if not answer.startswith(b"HTTP/1.1 200"):
            times[-1] = PATIENCE
    connection.send(times)


@contextlib.contextmanager
def health_watched(path: str, times: list[float]) -> Iterator[None]:
    """Fill `times` with the latency of /health requests during the context, in seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ask_health, args=(path, theirs))
    process.start()
    try:
        yield
        ours.send("stop")
        times += ours.recv()
    finally:
        process.terminate()
        process.join()


def _get(path: str, address: str) -> bytes:
    """Return the whole HTTP response of a GET request."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(PATIENCE)
        link.connect(path)
        head = f"GET {address} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        link.sendall(head.encode())
        parts = []
        while part := link.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@dataclass
class Memory:
    """Resident bytes of a process, one sample per second."""

    pid: int
    samples: list[int] = field(default_factory=list)

    def sample(self) -> None:
        """Add a sample."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        (kib,) = re.findall(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
        self.samples.append(1024 * int(kib))

    @property
    def growth(self) -> float:
        """Return the growth from the end of the first fifth to the end, as a share."""
        part = max(1, len(self.samples) // 10)
        early = statistics.median(self.samples[2 * part : 3 * part + 1])
        late = statistics.median(self.samples[-part:])
        return late / early - 1


async def watch_memory(memories: Sequence[Memory], path: str) -> None:
    """Take a sample per second and request /metrics every 10 s, as Prometheus does."""
    num_samples = 0
    while True:
        for memory in memories:
            memory.sample()
        if num_samples % 10 == 0:
            await asyncio.to_thread(_get, path, "/metrics")
        num_samples += 1
        await asyncio.sleep(1.0)


# Server.


@dataclass(frozen=True)
class Resources:
    """Resources of a server.

    engine: requests and cache usage of the engine.
    sockets: open sockets. threads: threads outside of pools. tasks: tasks of the event loop.
    """

    engine: tuple[float, ...]
    sockets: int
    threads: int
    tasks: int


class ServerProcess:
    """`lockstep serve` in a process, with its log in a file."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self.path = str(folder / "socket")
        self.log = folder / "log"
        command = [
            "--uds",
            self.path,
            "--max-model-len",
            str(MODEL_LEN),
            "--max-num-seqs",
            str(ROWS),
        ]
        command += ["--num-gpu-blocks", str(PAGES)]
        command += ["--log-format", "json", "--enable-log-requests", *options]
        with self.log.open("w") as log:
            try:
                self.process = start_server(command, program=("-c", COMMAND), stderr=log)
            except RuntimeError as error:
                raise RuntimeError(f"{error}: {self.log.read_text()}") from None
        self.engine = _engine_of(self.process.pid)

    def resources(self) -> Resources:
        """Return the current resources of the server."""
        text = _get(self.path, "/metrics").decode()
        names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped")
        gauges = (_metric(text, name) for name in (*names, "kv_cache_usage_perc"))
        folder = Path(f"/proc/{self.process.pid}")
        links = [os.readlink(link) for link in (folder / "fd").iterdir() if link.is_symlink()]
        sockets = sum(link.startswith("socket:") for link in links)
        (tasks, pooled) = self._tasks()
        threads = len(list((folder / "task").iterdir())) - pooled
        return Resources(tuple(gauges), sockets, threads, tasks)

    def _tasks(self) -> tuple[int, int]:
        """Return the numbers of event-loop tasks and of pool threads."""
        before = self.log.read_text().count("tasks ")
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + PATIENCE
        while True:
            counts = re.findall(r"^tasks (\d+) pooled (\d+)$", self.log.read_text(), re.MULTILINE)
            if len(counts) > before:
                (tasks, pooled) = counts[-1]
                return int(tasks), int(pooled)
            assert time.monotonic() < deadline, "the server does not log its tasks"
            time.sleep(0.02)

    def settled(self, before: Resources) -> Resources:
        """Return the resources once nothing has leaked, or after SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            time.sleep(1.0)
            now = self.resources()
            if not leaks_of(before, now) or time.monotonic() > deadline:
                return now

    def engine_seconds(self) -> dict[str, float]:
        """Return the engine's time of each logged request by its id, waiting included."""
        seconds_by_id: dict[str, float] = {}
        for line in self.log.read_text().splitlines():
            if '"logger": "lockstep.requests"' in line:
                entry = json.loads(line)
                if "inference_seconds" in entry:
                    seconds = entry["queue_seconds"] + entry["inference_seconds"]
                    seconds_by_id[entry["request_id"]] = seconds
        return seconds_by_id

    def stop(self) -> int:
        """Terminate the server as a supervisor does; return its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()


def _engine_of(pid: int) -> int:
    """Return the process id of the server's engine."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(pid)}
    (engine,) = [pid for pid, command in commands.items() if b"spawn_main" in command]
    return engine


def _metric(text: str, name: str) -> float:
    """Return the value of a metric."""
    (value,) = re.findall(rf"^lockstep:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return float(value)


def leaks_of(before: Resources, after: Resources) -> list[str]:
    """Return descriptions of resources that exceed those before the load."""
    leaks = [f"{name} in the engine" for name in after.engine if name]
    for name in ("sockets", "threads", "tasks"):
        increase = getattr(after, name) - getattr(before, name)
        if increase > 0:
            leaks.append(f"{increase} {name}")
    return leaks


# Measurements and checks.


def overhead(served: ServerProcess) -> list[float]:
    """Return the ms of requests beyond the engine's time, with OVERHEAD_STREAMS streams."""
    rng = random.Random(0)
    asks = []
    for number in range(OVERHEAD_STREAMS * OVERHEAD_ROUNDS):
        content = f"{TEXTS[number % len(TEXTS)]} {number}"
        fields = {"messages": [{"role": "user", "content": content}], "ignore_eos": True}
        fields["max_tokens"] = rng.randrange(*OVERHEAD_TOKENS)
        asks.append(Ask("overhead", CHAT, _json_body(fields)))
    outcomes = asyncio.run(TimingClient().send_all(served.path, asks, OVERHEAD_STREAMS))
    time.sleep(1.0)  # until the last log lines are written
    engine = served.engine_seconds()
    ramp_ids = {name_of(number) for number in range(OVERHEAD_STREAMS)}  # sent while streams start
    late = [outcome for outcome in outcomes if outcome.request_id not in ramp_ids]
    return [1e3 * (outcome.seconds - engine[outcome.request_id]) for outcome in late]


def run_load(
    served: ServerProcess, asks: Iterable[Ask], streams: int, show: Callable[[int], None]
) -> tuple[list[Outcome], list[Memory]]:
    """Run the load; return all outcomes and the memory of both processes."""
    memories = [Memory(served.process.pid), Memory(served.engine)]

    async def work() -> list[Outcome]:
        watching = asyncio.create_task(watch_memory(memories, served.path))
        try:
            return await send_all(served.path, asks, streams, show)
        finally:
            watching.cancel()

    return asyncio.run(work()), memories


def compare(outcomes: Sequence[Outcome], show: Callable[[int], None]) -> tuple[int, list[str]]:
    """Compare answers with LLM.generate; return their number and those that differ."""
    complete = [
        outcome
        for outcome in outcomes
        if outcome.ask.alone and outcome.ask.disconnect_after is None and not outcome.fault
    ]
    chosen = random.Random(0).sample(complete, min(COMPARED, len(complete)))
    llm = LLM(max_model_len=MODEL_LEN, max_num_seqs=1, speculative_config=DRAFTS)
    different = []
    for done, outcome in enumerate(chosen):
        if outcome.ask.alone(llm) != outcome.tokens:
            different.append(f"{outcome.request_id} ({outcome.ask.kind})")
        show(done + 1)
    return len(chosen), different


@dataclass(frozen=True)
class Check:
    """Row of the result table.

    figure: measured value. bound: its limit.
    """

    name: str
    figure: str
    bound: str
    holds: bool


def judge(figures: dict[str, Any]) -> list[Check]:
    """Return the rows of the result table."""
    lines = [
        Check("requests that failed", str(len(figures["faults"])), "0", not figures["faults"]),
        Check(
            "left behind",
            ", ".join(figures["left_behind"]) or "nothing",
            "nothing",
            not figures["left_behind"],
        ),
    ]
    for name in ("server", "engine"):
        growth = figures[f"{name}_growth"]
        ends = [figures[f"{name}_{what}"] for what in ("mib_begin", "mib")]
        shown = f"{ends[0]:.0f} to {ends[1]:.0f} MiB, {growth:+.1%}"
        lines.append(Check(f"memory, {name}", shown, f"{GROWTH:+.0%}", growth <= GROWTH))
    max_ms = figures["health_ms_max"]
    shown = f"{figures['health_ms_p50']:.1f} / {figures['health_ms_p99']:.1f} / {max_ms:.1f} ms"
    lines.append(
        Check("/health, p50 / p99 / most", shown, f"{HEALTH_MS:g} ms", max_ms <= HEALTH_MS)
    )
    p99 = figures["overhead_ms_p99"]
    shown = f"{figures['overhead_ms_p50']:.2f} / {p99:.2f} ms"
    lines.append(
        Check("beyond the engine, p50 / p99", shown, f"{OVERHEAD_MS:g} ms", p99 <= OVERHEAD_MS)
    )
    different = figures["different"]
    shown = f"{figures['compared'] - len(different)} of {figures['compared']}"
    lines.append(Check("answers as LLM.generate's", shown, "all", not different))
    return lines


def measure(args: argparse.Namespace, show: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Start the server, run all measurements, and return their figures."""
    health: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        served = ServerProcess(Path(folder), args.options)
        try:
            show("beyond the engine", 0, 1)
            overheads = overhead(served)
            before = served.settled(served.resources())
            used = cpu_seconds(served.process.pid)
            began = time.monotonic()
            with health_watched(served.path, health):
                outcomes, memories = run_load(
                    served,
                    requests_until(args.requests, args.seconds),
                    args.streams,
                    lambda done: show("load", done, max(done, args.requests)),
                )
                seconds = time.monotonic() - began
            used = cpu_seconds(served.process.pid) - used
            after = served.settled(before)
        finally:
            status = served.stop()
    faults = [f"{one.request_id} ({one.ask.kind}): {one.fault}" for one in outcomes if one.fault]
    faults += [f"the server ended with status {status}"] if status else []
    compared, different = compare(outcomes, lambda done: show("compared", done, COMPARED))
    return {
        "requests": len(outcomes),
        "streams": args.streams,
        "seconds": round(seconds, 1),
        "tokens": sum(len(one.tokens) for one in outcomes),
        "server_cpu_ms_per_request": round(1e3 * used / len(outcomes), 2),
        "load_average": os.getloadavg()[0],
        "kinds": dict(Counter(one.ask.kind for one in outcomes)),
        "faults": faults,
        "left_behind": leaks_of(before, after),
        **{
            f"{name}_{what}": value
            for name, memory in zip(("server", "engine"), memories, strict=True)
            for what, value in (
                ("mib_begin", round(memory.samples[0] / 2**20, 1)),
                ("mib", round(memory.samples[-1] / 2**20, 1)),
                ("growth", round(memory.growth, 4)),
            )
        },
        "health_asked": len(health),
        **{f"health_ms_p{p}": round(1e3 * percentile(health, p / 100), 2) for p in (50, 99)},
        "health_ms_max": round(1e3 * max(health), 2),
        **{f"overhead_ms_p{p}": round(percentile(overheads, p / 100), 3) for p in (50, 99)},
        "compared": compared,
        "different": different,
    }


def main() -> None:
    """Print the table, or a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=0, help="minimum duration")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON instead of the table"
    )
    parser.add_argument("options", nargs="*", help="options of lockstep serve, after --")
    args = parser.parse_args()

    def show(what: str, done: int, total: int) -> None:
        if done % 100 == 0:
            print(f"{what}: {done} of {total}", file=sys.stderr)

    # So that the server ends with this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    figures = measure(args, show)
    lines = judge(figures)
    if args.json:
        print(json.dumps(figures | {"holds": all(line.holds for line in lines)}))
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(figures["kinds"].items()))
        print(
            f"{figures['requests']} requests, {figures['streams']} at once, {figures['seconds']} s"
        )
        print(f"  {figures['tokens']} tokens; {kinds}")
        cost = figures["server_cpu_ms_per_request"]
        busy = figures["load_average"]
        print(f"  {cost} ms of CPU in the server per request; load average {busy:.1f}")
        for line in lines:
            mark = "ok" if line.holds else "NO"
            print(f"{mark}  {line.name:30} {line.figure:30} {line.bound}")
        for fault in (*figures["faults"][:10], *figures["different"][:10]):
            print(f"    {fault}")
    raise SystemExit(0 if all(line.holds for line in lines) else 1)


if __name__ == "__main__":
    main()
