"""Proof that the server holds under load: nothing lost, nothing left behind, no answer changed.

    python benchmarks/load.py [--requests 2000] [--seconds 0] [--streams 200] [--json] [-- OPTIONS]

OPTIONS are those of serve. Starts `lockstep serve` with the bundled model and asks it, so many
streams at once, for texts, chats, tools and grammars; among them are clients that leave at any
moment, bodies that are broken or too large, and prompts that are too long. Then it looks at what is
left:

- every request got what it had to: a whole answer, or the refusal that it deserved
- rows, pages, tasks and sockets are back to what they were
- memory of the server and of its engine's process is flat behind the first fifth of the run
- /health answered within HEALTH_MS all the while, asked by a process of its own
- with OVERHEAD_STREAMS at once, a request took at most OVERHEAD_MS longer than the engine worked
  on it (p99), up to the last byte of its answer; a client that parses nothing takes the time
- the tokens of COMPARED answers are those of LLM.generate, one request at a time, with drafts

Ends with status 1 where one of them does not hold.
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
import subprocess
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

HEALTH_MS = 100.0
HEALTH_SECONDS = 0.05
"""Between two questions for /health."""
OVERHEAD_MS = 5.0
OVERHEAD_STREAMS = 32
OVERHEAD_ROUNDS = 21
OVERHEAD_TOKENS = (32, 97)
"""Of an answer, drawn between these, so that requests do not all begin and end at once."""
GROWTH = 0.05
"""Of memory, the most between the time behind the first fifth of a run and its end."""
COMPARED = 100
RAMP_SECONDS = 5.0
"""In which the streams of a load begin, one after the other."""
PATIENCE = 600.0
"""Seconds that any answer may take."""
SETTLE_SECONDS = 30.0
"""How long the server may take until nothing is left of a load."""
MODEL_LEN = 4096
ROWS = 32
PAGES = 400
"""So few that all have been used soon: memory that no page has touched yet is not resident."""
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
COMMAND = """
import asyncio, signal, sys, threading
POOLS = ("asyncio_", "ThreadPoolExecutor", "lockstep-compile", "lockstep-body")
def told(*_):
    pooled = sum(thread.name.startswith(POOLS) for thread in threading.enumerate())
    print(f"tasks {len(asyncio.all_tasks())} pooled {pooled}", file=sys.stderr, flush=True)
signal.signal(signal.SIGUSR1, told)
from lockstep.__main__ import main
main()
"""
"""The command, which tells how many tasks its event loop has when it is asked by a signal, and how
many threads the pools of the loop, by asyncio's name or uvloop's, of grammars and of large bodies:
those are made as they are needed, up to a bound, and kept."""


# What is asked.

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
"""Of a stream that came to its end: its last event, and the chunk that closes the answer."""


@dataclass(frozen=True)
class Ask:
    """A request. status: what it has to be answered with. leaves: events after which the client is
    gone, -1: in the middle of the body, None: it reads to the end. claimed: bytes that the head
    promises, where that is not the body's length. alone: gives the tokens that it must get."""

    kind: str
    path: str
    body: bytes
    status: int = 200
    leaves: int | None = None
    claimed: int | None = None
    alone: Callable[[LLM], list[int]] | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes as events."""
        return b'"stream": true' in self.body


def _drawn(rng: random.Random) -> dict[str, Any]:
    """Parameters that a seed makes certain."""
    return {
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 0.9)),
        "seed": rng.randrange(1 << 31),
        "max_tokens": rng.randrange(16, 160),
    }


def _sent(fields: dict[str, Any], stream: bool = True) -> bytes:
    return json.dumps({**fields, "stream": stream, "return_token_ids": True}).encode()


def completion(rng: random.Random, **more: Any) -> Ask:
    """A text that goes on."""
    prompt = f"{rng.choice(TEXTS)} {rng.randrange(1000)}"
    drawn = _drawn(rng) | more

    def alone(llm: LLM) -> list[int]:
        return llm.generate(prompt, SamplingParams(**drawn))[0].outputs[0].token_ids

    body = _sent({"prompt": prompt, **drawn}, rng.random() < 0.7)
    return Ask("completion", COMPLETIONS, body, alone=alone)


def grammar(rng: random.Random) -> Ask:
    """An answer of a given form."""
    found = completion(rng, structured_outputs=rng.choice(GRAMMARS))
    return Ask("grammar", found.path, found.body, alone=found.alone)


def long_prompt(rng: random.Random) -> Ask:
    """Many tokens in, few out."""
    prompt = " ".join(f"{rng.choice(OWNERS)} {rng.randrange(1000)}" for _ in range(300))
    drawn = _drawn(rng) | {"max_tokens": 8}

    def alone(llm: LLM) -> list[int]:
        return llm.generate(prompt, SamplingParams(**drawn))[0].outputs[0].token_ids

    return Ask("long prompt", COMPLETIONS, _sent({"prompt": prompt, **drawn}), alone=alone)


def tools(rng: random.Random) -> Ask:
    """A chat whose answer is a call."""
    text = f"Find the record where owner is {rng.choice(OWNERS)} and limit is {rng.randrange(40)}."
    messages = [{"role": "user", "content": text}]
    drawn = _drawn(rng) | {"max_tokens": 80}

    def alone(llm: LLM) -> list[int]:
        params = SamplingParams(**drawn)
        return llm.chat(messages, params, tools=[TOOL])[0].outputs[0].token_ids

    return Ask("tools", CHAT, _sent({"messages": messages, "tools": [TOOL], **drawn}), alone=alone)


def required(rng: random.Random) -> Ask:
    """A chat that has to call."""
    found = tools(rng)
    return Ask("required", CHAT, found.body[:-1] + b', "tool_choice": "required"}')


def several(rng: random.Random) -> Ask:
    """More than one completion of a prompt."""
    fields = {"prompt": rng.choice(TEXTS), **_drawn(rng), "n": rng.randrange(2, 4)}
    return Ask("several", COMPLETIONS, _sent(fields))


def leaver(rng: random.Random) -> Ask:
    """A client that goes after some events, or before the first."""
    found = rng.choice((completion, grammar, tools, several, long_prompt))(rng)
    body = found.body.replace(b'"stream": false', b'"stream": true')
    return Ask("leaver", found.path, body, leaves=rng.choice((0, 0, 1, 2, 5, 20)))


def half(rng: random.Random) -> Ask:
    """A client that goes in the middle of its body."""
    found = completion(rng)
    return Ask("half a body", found.path, found.body, leaves=-1)


def broken(rng: random.Random) -> Ask:
    """A body that means nothing."""
    return Ask("broken body", rng.choice((COMPLETIONS, CHAT)), rng.choice(BROKEN), status=400)


def huge(rng: random.Random) -> Ask:
    """A prompt of more tokens, or more characters, than there may be."""
    prompt: Any = [5] * (MODEL_LEN + 1) if rng.random() < 0.5 else "word " * 1_000_000
    return Ask("huge prompt", COMPLETIONS, json.dumps({"prompt": prompt}).encode(), status=400)


def oversized(rng: random.Random) -> Ask:
    """A body of more bytes than there may be; none of them need be sent to be refused."""
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


def draw(number: int) -> Ask:
    """The request of a number, always the same."""
    rng = random.Random(number)
    makers = [maker for maker, _ in KINDS]
    return rng.choices(makers, [share for _, share in KINDS])[0](rng)


def drawn(requests: int, seconds: float) -> Iterator[Ask]:
    """At least so many requests, and more until so many seconds have passed since the first."""
    until = time.monotonic() + seconds
    for number in count():
        if number >= requests and time.monotonic() >= until:
            return
        yield draw(number)


# How it is asked.


@dataclass
class Outcome:
    """What came of a request. fault: in which way it is not what it had to be. request_id: as it
    was sent. seconds: from its first byte to the last of the answer."""

    ask: Ask
    request_id: str
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    fault: str | None = None


def _head(ask: Ask, request_id: str, connection: str = "close") -> bytes:
    length = len(ask.body) if ask.claimed is None else ask.claimed
    head = (
        f"POST {ask.path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        f"X-Request-Id: {request_id}\r\n\r\n"
    )
    return head.encode()


async def send(path: str, ask: Ask, request_id: str) -> Outcome:
    """Asks, and judges the answer."""
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
    ask = outcome.ask
    head = _head(ask, outcome.request_id)
    body = ask.body[: len(ask.body) // 2] if ask.leaves == -1 else ask.body
    writer.write(head + body)
    await writer.drain()
    if ask.leaves == -1:
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
    """Reads a stream until the client leaves it, or it has to have come to its end."""
    wanted = outcome.ask.leaves
    seen = 0
    reasons: dict[int, str] = {}
    last = b""
    async for event in _events(reader):
        if wanted is not None and seen >= wanted:
            return
        seen += 1
        last = event
        if last != b"[DONE]":
            _read_event(json.loads(last), outcome, reasons)
    if wanted is None:
        _judge_end(outcome, reasons, last == b"[DONE]")


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of events; the lines between them are those of chunks and heads."""
    begun = b""
    while block := await reader.read(1 << 16):
        *lines, begun = (begun + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].strip()


def _read_event(event: dict[str, Any], outcome: Outcome, reasons: dict[int, str]) -> None:
    if "error" in event:
        outcome.fault = f"in the stream: {event['error']}"
    for choice in event.get("choices", ()):
        if choice["index"] == 0:
            outcome.tokens += choice.get("token_ids") or ()
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]


def _read_whole(answer: dict[str, Any], outcome: Outcome) -> None:
    reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    outcome.tokens = answer["choices"][0]["token_ids"]
    _judge_end(outcome, reasons, True)


def _judge_end(outcome: Outcome, reasons: dict[int, str], done: bool) -> None:
    fields = json.loads(outcome.ask.body)
    if not done or len(reasons) != fields.get("n", 1):
        outcome.fault = outcome.fault or f"the answer broke off: {reasons}, [DONE]: {done}"
    elif not set(reasons.values()) <= {"stop", "length", "tool_calls"}:
        outcome.fault = outcome.fault or f"it ended with {reasons}"


def name_of(number: int) -> str:
    """The id of a request by its number."""
    return f"load-{number}"


class Timed:
    """Asks for streams over connections that are kept, as clients of HTTP keep them, and takes the
    time until the last byte of each is there. What comes is not looked at, so that the client's own
    work is next to none of that time."""

    def __init__(self) -> None:
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, path: str, ask: Ask, request_id: str) -> Outcome:
        """Over a connection that nobody uses, or a new one."""
        outcome = Outcome(ask, request_id)
        began = time.monotonic()
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_unix_connection(path)
        writer.write(_head(ask, request_id, "keep-alive") + ask.body)
        seen = b""
        while seen != LAST_BYTES:
            block = await reader.read(1 << 16)
            if not block:
                raise RuntimeError(f"{request_id} broke off behind {seen!r}")
            seen = (seen + block)[-len(LAST_BYTES) :]
        outcome.seconds = time.monotonic() - began
        self._idle.append((reader, writer))
        return outcome

    async def send_all(self, path: str, asks: Iterable[Ask], streams: int) -> list[Outcome]:
        """All of them, so many at once; then the connections are closed."""
        found = await send_all(path, asks, streams, lambda done: None, self.send)
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()
        return found


Send = Callable[[str, Ask, str], Coroutine[Any, Any, Outcome]]


async def send_all(
    path: str,
    asks: Iterable[Ask],
    streams: int,
    show: Callable[[int], None],
    send: Send = send,
) -> list[Outcome]:
    """All of them, so many at once."""
    found: list[Outcome] = []
    numbered = enumerate(asks)

    async def work(place: int) -> None:
        await asyncio.sleep(RAMP_SECONDS * place / streams)
        for number, ask in numbered:
            found.append(await send(path, ask, name_of(number)))
            show(len(found))

    await asyncio.gather(*(work(place) for place in range(streams)))
    return found


# What is watched meanwhile.


def ask_health(path: str, told: Connection) -> None:
    """In a process of its own: asks until it is told to stop, and gives the seconds of each."""
    times: list[float] = []
    while not told.poll(HEALTH_SECONDS):
        began = time.monotonic()
        answer = _get(path, "/health")
        times.append(time.monotonic() - began)
        if not answer.startswith(b"HTTP/1.1 200"):
            times[-1] = PATIENCE
    told.send(times)


@contextlib.contextmanager
def health_watched(path: str, times: list[float]) -> Iterator[None]:
    """Fills the list with how long each answer took, in seconds."""
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
    """Resident bytes of a process over time, a sample a second."""

    pid: int
    samples: list[int] = field(default_factory=list)

    def sample(self) -> None:
        """One more."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        (kib,) = re.findall(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
        self.samples.append(1024 * int(kib))

    @property
    def growth(self) -> float:
        """From the time behind the first fifth to the last, as a share."""
        part = max(1, len(self.samples) // 10)
        early = statistics.median(self.samples[2 * part : 3 * part + 1])
        late = statistics.median(self.samples[-part:])
        return late / early - 1


async def watch_memory(memories: Sequence[Memory], path: str) -> None:
    """A sample a second; /metrics is asked now and then, as a Prometheus does."""
    count = 0
    while True:
        for memory in memories:
            memory.sample()
        if count % 10 == 0:
            await asyncio.to_thread(_get, path, "/metrics")
        count += 1
        await asyncio.sleep(1.0)


# The server.


@dataclass(frozen=True)
class Left:
    """What a server holds: requests and pages in its engine, open sockets, threads that are not of
    the server's pools, and tasks."""

    held: tuple[float, ...]
    sockets: int
    threads: int
    tasks: int


class Served:
    """`lockstep serve` in a process, with its log in a file."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self.path = str(folder / "socket")
        self.log = folder / "log"
        command = [sys.executable, "-c", COMMAND, "serve", "--uds", self.path]
        command += ["--max-model-len", str(MODEL_LEN), "--max-num-seqs", str(ROWS)]
        command += ["--num-gpu-blocks", str(PAGES)]
        command += ["--log-format", "json", "--enable-log-requests", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), f"it did not start: {self.log.read_text()}"
        self.engine = _engine_of(self.process.pid)

    def left(self) -> Left:
        """What it holds now."""
        text = _get(self.path, "/metrics").decode()
        names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped")
        held = (_metric(text, name) for name in (*names, "kv_cache_usage_perc"))
        folder = Path(f"/proc/{self.process.pid}")
        links = [os.readlink(link) for link in (folder / "fd").iterdir() if link.is_symlink()]
        sockets = sum(link.startswith("socket:") for link in links)
        (tasks, pooled) = self._tasks()
        threads = len(list((folder / "task").iterdir())) - pooled
        return Left(tuple(held), sockets, threads, tasks)

    def _tasks(self) -> tuple[int, int]:
        """Tasks of the event loop, and threads of its pool."""
        before = self.log.read_text().count("tasks ")
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + PATIENCE
        while True:
            found = re.findall(r"^tasks (\d+) pooled (\d+)$", self.log.read_text(), re.MULTILINE)
            if len(found) > before:
                (tasks, pooled) = found[-1]
                return int(tasks), int(pooled)
            assert time.monotonic() < deadline, "the server does not tell of its tasks"
            time.sleep(0.02)

    def settled(self, before: Left) -> Left:
        """What is left once nothing more goes away, or SETTLE_SECONDS have passed."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            time.sleep(1.0)
            now = self.left()
            if not left_behind(before, now) or time.monotonic() > deadline:
                return now

    def engine_seconds(self) -> dict[str, float]:
        """How long the engine took for each request of the log, waiting included, by its id."""
        found: dict[str, float] = {}
        for line in self.log.read_text().splitlines():
            if '"logger": "lockstep.requests"' in line:
                told = json.loads(line)
                if "inference_seconds" in told:
                    seconds = told["queue_seconds"] + told["inference_seconds"]
                    found[told["request_id"]] = seconds
        return found

    def cpu_seconds(self) -> float:
        """That the server's process has used, without its engine's."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text()
        ticks = text.rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        """Ends it as a supervisor does; its status."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()


def _engine_of(pid: int) -> int:
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [child for each in threads for child in (each / "children").read_text().split()]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    (found,) = [pid for pid, command in commands.items() if b"spawn_main" in command]
    return int(found)


def _metric(text: str, name: str) -> float:
    (value,) = re.findall(rf"^lockstep:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return float(value)


def left_behind(before: Left, after: Left) -> list[str]:
    """What there is that was not there before."""
    found = [f"{name} in the engine" for name in after.held if name]
    for name in ("sockets", "threads", "tasks"):
        more = getattr(after, name) - getattr(before, name)
        if more > 0:
            found.append(f"{more} {name}")
    return found


# What is measured, and what is held.


def percentile(values: Sequence[float], share: float) -> float:
    """Of values in any order."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def overhead(served: Served) -> list[float]:
    """ms that requests took beyond the engine's own time, with OVERHEAD_STREAMS at once."""
    rng = random.Random(0)
    asks = []
    for number in range(OVERHEAD_STREAMS * OVERHEAD_ROUNDS):
        content = f"{TEXTS[number % len(TEXTS)]} {number}"
        fields = {"messages": [{"role": "user", "content": content}], "ignore_eos": True}
        fields["max_tokens"] = rng.randrange(*OVERHEAD_TOKENS)
        asks.append(Ask("overhead", CHAT, _sent(fields)))
    outcomes = asyncio.run(Timed().send_all(served.path, asks, OVERHEAD_STREAMS))
    time.sleep(1.0)  # the last lines of the log
    engine = served.engine_seconds()
    first = {name_of(number) for number in range(OVERHEAD_STREAMS)}  # while streams still begin
    late = [one for one in outcomes if one.request_id not in first]
    return [1e3 * (one.seconds - engine[one.request_id]) for one in late]


def run_load(
    served: Served, asks: Iterable[Ask], streams: int, show: Callable[[int], None]
) -> tuple[list[Outcome], list[Memory]]:
    """The load itself: what came of each request, and the memory of both processes."""
    memories = [Memory(served.process.pid), Memory(served.engine)]

    async def work() -> list[Outcome]:
        watching = asyncio.create_task(watch_memory(memories, served.path))
        try:
            return await send_all(served.path, asks, streams, show)
        finally:
            watching.cancel()

    return asyncio.run(work()), memories


def compare(outcomes: Sequence[Outcome], show: Callable[[int], None]) -> tuple[int, list[str]]:
    """How many answers were compared with LLM.generate, and those that differ."""
    whole = [one for one in outcomes if one.ask.alone and one.ask.leaves is None and not one.fault]
    chosen = random.Random(0).sample(whole, min(COMPARED, len(whole)))
    llm = LLM(max_model_len=MODEL_LEN, max_num_seqs=1, speculative_config=DRAFTS)
    different = []
    for done, one in enumerate(chosen):
        if one.ask.alone(llm) != one.tokens:
            different.append(f"{one.request_id} ({one.ask.kind})")
        show(done + 1)
    return len(chosen), different


@dataclass(frozen=True)
class Line:
    """One thing that is held. told: the figure; bound: what it has to be."""

    name: str
    told: str
    bound: str
    holds: bool


def judge(found: dict[str, Any]) -> list[Line]:
    """The lines of the table."""
    lines = [
        Line("requests that failed", str(len(found["faults"])), "0", not found["faults"]),
        Line(
            "left behind",
            ", ".join(found["left_behind"]) or "nothing",
            "nothing",
            not found["left_behind"],
        ),
    ]
    for name in ("server", "engine"):
        growth = found[f"{name}_growth"]
        ends = [found[f"{name}_{what}"] for what in ("mib_begin", "mib")]
        told = f"{ends[0]:.0f} to {ends[1]:.0f} MiB, {growth:+.1%}"
        lines.append(Line(f"memory, {name}", told, f"{GROWTH:+.0%}", growth <= GROWTH))
    most = found["health_ms_max"]
    told = f"{found['health_ms_p50']:.1f} / {found['health_ms_p99']:.1f} / {most:.1f} ms"
    lines.append(Line("/health, p50 / p99 / most", told, f"{HEALTH_MS:g} ms", most <= HEALTH_MS))
    beyond = found["overhead_ms_p99"]
    told = f"{found['overhead_ms_p50']:.2f} / {beyond:.2f} ms"
    lines.append(
        Line("beyond the engine, p50 / p99", told, f"{OVERHEAD_MS:g} ms", beyond <= OVERHEAD_MS)
    )
    different = found["different"]
    told = f"{found['compared'] - len(different)} of {found['compared']}"
    lines.append(Line("answers as LLM.generate's", told, "all", not different))
    return lines


def measure(asked: argparse.Namespace, show: Callable[[str, int, int], None]) -> dict[str, Any]:
    """All figures."""
    health: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), asked.options)
        try:
            show("beyond the engine", 0, 1)
            beyond = overhead(served)
            before = served.settled(served.left())
            used = served.cpu_seconds()
            began = time.monotonic()
            with health_watched(served.path, health):
                outcomes, memories = run_load(
                    served,
                    drawn(asked.requests, asked.seconds),
                    asked.streams,
                    lambda done: show("load", done, max(done, asked.requests)),
                )
                seconds = time.monotonic() - began
            used = served.cpu_seconds() - used
            after = served.settled(before)
        finally:
            status = served.stop()
    faults = [f"{one.request_id} ({one.ask.kind}): {one.fault}" for one in outcomes if one.fault]
    faults += [f"the server ended with status {status}"] if status else []
    compared, different = compare(outcomes, lambda done: show("compared", done, COMPARED))
    return {
        "requests": len(outcomes),
        "streams": asked.streams,
        "seconds": round(seconds, 1),
        "tokens": sum(len(one.tokens) for one in outcomes),
        "server_cpu_ms_per_request": round(1e3 * used / len(outcomes), 2),
        "load_average": os.getloadavg()[0],
        "kinds": dict(Counter(one.ask.kind for one in outcomes)),
        "faults": faults,
        "left_behind": left_behind(before, after),
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
        **{f"overhead_ms_p{p}": round(percentile(beyond, p / 100), 3) for p in (50, 99)},
        "compared": compared,
        "different": different,
    }


def main() -> None:
    """Prints the table, or a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=0, help="go on for at least so long")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="a line of JSON, not the table")
    parser.add_argument("options", nargs="*", help="of lockstep serve, behind --")
    asked = parser.parse_args()

    def show(what: str, done: int, of: int) -> None:
        if done % 100 == 0:
            print(f"{what}: {done} of {of}", file=sys.stderr)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with this script
    found = measure(asked, show)
    lines = judge(found)
    if asked.json:
        print(json.dumps(found | {"holds": all(line.holds for line in lines)}))
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["kinds"].items()))
        print(f"{found['requests']} requests, {found['streams']} at once, {found['seconds']} s")
        print(f"  {found['tokens']} tokens; {kinds}")
        cost = found["server_cpu_ms_per_request"]
        busy = found["load_average"]
        print(f"  {cost} ms of CPU in the server per request; load average {busy:.1f}")
        for line in lines:
            mark = "ok" if line.holds else "NO"
            print(f"{mark}  {line.name:30} {line.told:30} {line.bound}")
        for fault in (*found["faults"][:10], *found["different"][:10]):
            print(f"    {fault}")
    raise SystemExit(0 if all(line.holds for line in lines) else 1)


if __name__ == "__main__":
    main()
