"""An engine process that is killed, hangs, fails at its start, or is lost repeatedly."""

import asyncio
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest

from lockstep.engine import process_transport
from lockstep.engine.async_engine import (
    ENGINE_RESTARTED,
    UPDATES_PER_ITERATION,
    AsyncEngine,
    Receiver,
    Stream,
)
from lockstep.engine.engine_process import STEPS_NICENESS, lower_priority
from lockstep.engine.messages import Updates
from lockstep.engine.process_transport import MAX_RESTARTS, ProcessTransport
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import ConfigError, EngineDeadError, RequestError
from lockstep.outputs import Logprob, RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from tests import engine_factories
from tests.engine_factories import run, wait_until, wait_until_empty
from tests.tiny_model import TWO_LAYERS, make_model

LONG = 3000
STEP_SECONDS = 5.0
ROWS = 2
LOWEST_PRIORITY = 19


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of a tiny engine."""
    return {
        "model": str(make_model(tmp_path_factory.mktemp("process"), **TWO_LAYERS)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": ROWS,
        "num_gpu_blocks": 120,
    }


@pytest.fixture(scope="module")
def shared(settings: dict[str, Any], forked_processes: None) -> Iterator[AsyncEngine]:
    """Yield one client for all tests, since a start takes seconds."""
    result = AsyncEngine(ProcessTransport(partial(engine_factories.faulty, settings), STEP_SECONDS))
    result.start()
    yield result
    result.shutdown()


@pytest.fixture
def client(shared: AsyncEngine) -> AsyncEngine:
    """Return the shared client, empty and with its restart count reset."""
    wait_until_empty(shared)
    shared.transport._restart_times.clear()
    return shared


def make_request(name: str, max_tokens: int = 12) -> Request:
    """Return a sampled request with a prompt that depends on the name's first letter only."""
    ids = [ord(name[0]) % 90 + i % 7 for i in range(20)]
    params = SamplingParams(temperature=1.0, seed=7, ignore_eos=True, max_tokens=max_tokens)
    return Request(name, ids, params, seed=7)


async def read(stream: Stream) -> list[TokenUpdate]:
    """Return all updates of a stream."""
    return [update async for update in stream]


def tokens_of(updates: list[TokenUpdate]) -> list[int]:
    """Return the tokens of all updates."""
    return [token for update in updates for token in update.token_ids]


async def lose_engine(
    client: AsyncEngine, end: Callable[[int], None]
) -> dict[str, list[TokenUpdate]]:
    """End the engine while all rows run and more requests wait; return every request's updates."""
    rows = [client.stream(make_request(f"{name} runs", LONG)) for name in "ab"]
    waiting = [client.stream(make_request(f"{name} waits")) for name in "cdef"]
    for stream in rows:
        await anext(aiter(stream))
    client.abort("f waits")
    end(client.transport.pid)
    result = await asyncio.gather(*map(read, rows + waiting))
    return dict(zip("abcdef", result, strict=True))


def assert_only_running_requests_are_lost(
    actual: dict[str, list[TokenUpdate]], expected: dict[str, list[int]]
) -> None:
    """Assert that running requests end with an error, and that waiting ones are answered as
    expected."""
    for name in "ab":
        last = actual[name][-1]
        assert (last.finish_reason, last.error) == ("error", ENGINE_RESTARTED)
    for name in "cde":
        assert tokens_of(actual[name]) == expected[name]
        assert actual[name][-1].finish_reason == "length"
    assert actual["f"][-1].finish_reason == "abort"


def answers(client: AsyncEngine, names: str) -> dict[str, list[int]]:
    """Return each request's answer without any failure."""

    async def work() -> list[list[TokenUpdate]]:
        return await asyncio.gather(
            *(read(client.stream(make_request(f"{n} alone"))) for n in names)
        )

    return dict(zip(names, map(tokens_of, run(work())), strict=True))


def test_killed_engine_restarts_and_answers_waiting_requests(client: AsyncEngine) -> None:
    expected = answers(client, "cde")
    before = wait_until_empty(client)
    pid = client.transport.pid
    actual = run(lose_engine(client, lambda pid: os.kill(pid, signal.SIGKILL)))
    assert_only_running_requests_are_lost(actual, expected)
    after = wait_until_empty(client)
    assert client.transport.pid != pid and client.is_alive and not client.restarting
    assert after.restarts_total == before.restarts_total + 1
    assert after.requests_success_total["error"] == before.requests_success_total["error"] + 2
    assert after.requests_success_total["length"] == before.requests_success_total["length"] + 3
    of_lost = after.generation_tokens_total - before.generation_tokens_total - 36
    assert 0 <= of_lost <= 2 * LONG, "what the lost requests had counts too"
    assert after.steps_total > before.steps_total


@pytest.mark.slow
def test_stopped_engine_is_restarted(client: AsyncEngine) -> None:
    expected = answers(client, "cde")
    begun = time.monotonic()
    actual = run(lose_engine(client, lambda pid: os.kill(pid, signal.SIGSTOP)))
    assert_only_running_requests_are_lost(actual, expected)
    assert time.monotonic() - begun > STEP_SECONDS


@pytest.mark.slow
def test_hanging_step_restarts_the_engine(client: AsyncEngine) -> None:
    """Although the process sends heartbeats. The request that hung it is not retried."""

    async def work() -> list[TokenUpdate]:
        return await read(client.stream(make_request("hang")))

    pid = client.transport.pid
    (only,) = run(work())
    assert only.error == ENGINE_RESTARTED and client.transport.pid != pid
    assert len(client.transport._restart_times) == 2
    assert len(answers(client, "c")["c"]) == 12


def test_cpu_engine_runs_at_lower_priority(client: AsyncEngine) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    steps = os.getpriority(os.PRIO_PROCESS, client.transport.pid)
    assert steps == min(mine + STEPS_NICENESS, LOWEST_PRIORITY)


def test_gpu_engine_keeps_priority() -> None:
    """The GPU would wait for the host's threads."""
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    lower_priority("cuda")
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="signals are read from /proc")
def test_compilation_keeps_signals_ignored(settings: dict[str, Any]) -> None:
    """LLVM installs handlers with its first pass, for one signal each; a second signal would end
    the process."""
    pytest.importorskip("triton")
    transport = ProcessTransport(partial(engine_factories.compiling, settings), STEP_SECONDS)
    try:
        with open(f"/proc/{transport.pid}/status") as file:
            received = dict(line.split(":", 1) for line in file)
        ignored = int(received["SigIgn"], 16)
        assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))
    finally:
        transport.stop()


def test_too_many_restarts_end_the_client(settings: dict[str, Any], forked_processes: None) -> None:
    received: list[str] = []
    client = AsyncEngine(ProcessTransport(partial(engine_factories.faulty, settings), STEP_SECONDS))
    client.on_end = received.append
    client.transport._restart_times.extend([time.monotonic()] * (MAX_RESTARTS - 1))
    assert client.transport._may_restart(), "this one is the last"
    client.start()

    async def work() -> None:
        with pytest.raises(EngineDeadError, match="the device is gone.*Restart the server"):
            await read(client.stream(make_request("die")))

    run(work())
    wait_until(lambda: bool(received))
    assert received == ["the device is gone"] and not client.is_alive and not client.restarting
    client.shutdown()


@pytest.mark.default_cases("make0")
@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (engine_factories.Signalled(), ConfigError, "dtype='x' is not allowed"),
        pytest.param(
            engine_factories.breaking, ZeroDivisionError, "one by none", marks=pytest.mark.slow
        ),
        (
            engine_factories.exiting,
            EngineDeadError,
            "did not start: its process ended with status 7",
        ),
    ],
)
def test_failed_start_raises_its_reason(
    make: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_transport, "get_context", get_context)  # a forked one differs
    shown: list[tuple[str, int, int]] = []
    with pytest.raises(kind, match=message) as raised:
        ProcessTransport(partial(make, {}), 60.0, lambda *progress: shown.append(progress))
    assert shown == ([("loading", 1, 2)] if kind is ConfigError else [])
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert ("engine_factories.py" in notes) == (make is engine_factories.breaking)


class FakeTransport:
    """Transport that records its calls."""

    restarting = False
    stalled_for = 0.0

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.receiver: Receiver

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def stop(self) -> None:
        self.receiver.ended("it was shut down", False)

    def submit(self, requests: Sequence[Request]) -> None:
        self.sent.extend(request.id for request in requests)

    def abort(self, request_id: str) -> None:
        self.sent.append(f"abort {request_id}")

    def reset_prefix_cache(self) -> None:
        self.sent.append("reset")

    def stats(self) -> Stats:
        return Stats()

    def lose_engine(self) -> int:
        return self.receiver.lost(self.sent.clear)


def test_request_is_requeued_once() -> None:
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()

    async def work() -> None:
        streams = {
            name: client.stream(make_request(name)) for name in ("begun", "waits", "gone", "late")
        }
        one = TokenUpdate([1], None, None, None, RequestMetrics(num_steps=3))
        transport.receiver.deliver([("begun", one), ("nobody", one)])
        client.abort("gone")
        assert transport.sent == ["begun", "waits", "gone", "late", "abort gone"]
        assert transport.lose_engine() == 1
        assert transport.sent == ["waits", "late"], "in their order, and what was aborted not"
        begun = await read(streams["begun"])
        assert [u.finish_reason for u in begun] == [None, "error"]
        assert begun[-1].metrics.num_steps == 3
        client.stream(make_request("new"))
        assert transport.lose_engine() == 2
        assert transport.sent == ["new"]
        assert (await read(streams["waits"]))[-1].error == ENGINE_RESTARTED

    run(work())
    client.shutdown()


def test_updates_are_delivered_over_several_loop_iterations() -> None:
    """Other work runs between the iterations."""
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()
    names = [str(number) for number in range(3 * UPDATES_PER_ITERATION)]
    received: list[tuple[str, int]] = []

    def update(number: int) -> TokenUpdate:
        return TokenUpdate([number], None, None, None, RequestMetrics())

    async def work() -> None:
        for name in names:
            hear = lambda one, name=name: received.append((name, one.token_ids[0]))  # noqa: E731
            client.submit([(make_request(name), hear)])
        for number in range(2):
            transport.receiver.deliver([(name, update(number)) for name in names])
        turns = 0
        while len(received) < 2 * len(names):
            turns += 1
            assert turns < 100
            await asyncio.sleep(0)
        assert turns >= 3

    run(work())
    assert received == [(name, number) for number in range(2) for name in names]
    client.shutdown()


def test_updates_per_loop_iteration_are_bounded() -> None:
    """For any number of waiting deliveries, from any number of threads."""
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()
    names = [str(number) for number in range(40)]
    turn = 0
    by_turn: Counter[int] = Counter()
    update = TokenUpdate([1], None, None, None, RequestMetrics())

    async def work() -> None:
        nonlocal turn
        for name in names:
            client.submit([(make_request(name), lambda _: by_turn.update([turn]))])
        for number in range(4):
            for name in names:
                transport.receiver.deliver([(name, update)])
            while by_turn.total() < (number + 1) * len(names):
                turn += 1
                assert turn < 1000
                await asyncio.sleep(0)

    run(work())
    assert by_turn.most_common(1)[0][1] == UPDATES_PER_ITERATION
    client.shutdown()


def test_each_event_loop_has_one_queue() -> None:
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()
    received: list[str] = []
    update = TokenUpdate([1], None, "length", None, RequestMetrics())
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def submit(name: str) -> None:
        client.submit([(make_request(name), lambda _: received.append(name))])

    async def hear() -> None:
        await asyncio.sleep(0)

    names = [str(number) for number in range(4)]
    for number, name in enumerate(names):
        loops[number % 2].run_until_complete(submit(name))
    transport.receiver.deliver([(name, update) for name in names])
    for loop in loops:
        loop.run_until_complete(hear())
    assert sorted(received) == names
    for loop in loops:
        loop.close()
    run(submit("another loop"))
    assert len(client._queues) == 1, "closed loops are dropped"
    client.shutdown()


def test_updates_survive_pickling() -> None:
    fields = [float(number) for number in range(9)]
    metrics = RequestMetrics(*fields)
    logprobs = [{1: Logprob(-0.5, 1)}]
    update = TokenUpdate([1], logprobs, "length", 7, metrics, [None], "why", ("plain",))
    refused = RequestError("too long", "prompt")
    actual = pickle.loads(pickle.dumps(Updates([("a", update), ("b", refused)])))
    (first, (name, error)) = actual.updates
    assert first == ("a", update)
    assert type(first[1]) is TokenUpdate
    assert (name, type(error), str(error)) == ("b", RequestError, "too long")
    assert metrics.copy() == metrics
    assert metrics.copy() is not metrics


def test_open_request_id_is_refused() -> None:
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()

    async def work() -> None:
        client.stream(make_request("a"))
        with pytest.raises(RequestError, match="request_id='a'"):
            client.stream(make_request("a"))
        with pytest.raises(RequestError, match="request_id='b'"):
            client.submit([(make_request("b"), print), (make_request("b"), print)])

    run(work())
    assert transport.sent == ["a"] and client.num_open == 1, "none of a refused call is queued"


def test_requests_survive_pickling() -> None:
    from lockstep.engine.messages import Submit

    request = make_request("a")
    request.cache_salt = "salt"
    request.speculate = False
    request.priority = 3
    request.eos_token_ids = frozenset({5})
    message = pickle.loads(pickle.dumps(Submit.of([request, make_request("b")])))
    first, second = (plain.request() for plain in message.requests)
    assert first is not request and vars(first) == vars(request)
    assert second.id == "b"


@pytest.mark.slow
def test_counters_continue_after_restart() -> None:
    lost = Stats(num_running=2, steps_total=5, accepted_at=(3, 1), ttft_seconds=[0.5])
    lost = replace(lost, pages=60, host_pages=7, fetched_total=1)
    lost.requests_success_total["stop"] = 2
    now = Stats(num_running=1, steps_total=1, accepted_at=(1, 1, 1), ttft_seconds=[0.25])
    now = replace(now, pages=60, host_pages=7, fetched_total=2)
    now.requests_success_total["length"] = 1
    actual = now.after(lost)
    assert (actual.num_running, actual.steps_total, actual.accepted_at) == (1, 6, (4, 2, 1))
    assert (actual.pages, actual.host_pages, actual.fetched_total) == (60, 7, 3)
    assert actual.requests_success_total == {"stop": 2, "length": 1}
    assert actual.ttft_seconds == [0.5, 0.25]
    assert lost.ttft_seconds == [0.5] and now.steps_total == 1
