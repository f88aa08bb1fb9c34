"""An engine process that is killed, hangs, fails at its start, or is lost repeatedly: its requests
go on in the next one."""

import asyncio
import os
import pickle
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe, get_context
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.engine import engine_process, process_transport
from lockstep.engine.async_engine import (
    UPDATES_PER_ITERATION,
    AsyncEngine,
    Loss,
    Receiver,
    Stream,
)
from lockstep.engine.engine_process import STEPS_NICENESS, _Host, lower_priority
from lockstep.engine.messages import Began, EngineRequest, Idle, StopAudits, Updates
from lockstep.engine.process_transport import (
    MAX_RESTARTS,
    ProcessTransport,
    limit_receiving,
)
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import ComputeError, ConfigError, EngineDeadError, RequestError
from lockstep.outputs import Logprob, RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import MAX_FAILED_REQUESTS, MAX_REQUEST_FAILURES, Request
from tests import engine_factories
from tests.engine_factories import run, wait_until_empty
from tests.tiny_model import TWO_LAYERS, make_model
from tests.waiting import wait_until

LONG = 300
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
    shared.transport._failed_requests = 0
    shared.transport._audit_losses.clear()
    shared.transport._are_audits_stopped = False
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
    begun = [[await anext(aiter(stream))] for stream in rows]
    client.abort("f waits")
    end(client.transport.pid)
    rest = await asyncio.gather(*map(read, rows + waiting))
    result = [a + b for a, b in zip(begun + [[]] * len(waiting), rest, strict=True)]
    return dict(zip("abcdef", result, strict=True))


def assert_answered(actual: dict[str, list[TokenUpdate]], expected: dict[str, list[int]]) -> None:
    """Assert that all requests but the aborted one are answered as expected."""
    for name in "abcde":
        assert tokens_of(actual[name]) == expected[name]
        assert actual[name][-1].finish_reason == "length"
        assert all(update.error is None for update in actual[name])
    assert actual["f"][-1].finish_reason == "abort"


def answers(client: AsyncEngine, names: str) -> dict[str, list[int]]:
    """Return each request's answer without any failure; those of a and b are long."""

    async def work() -> list[list[TokenUpdate]]:
        lengths = {name: LONG if name in "ab" else 12 for name in names}
        streams = [client.stream(make_request(f"{n} alone", lengths[n])) for n in names]
        return await asyncio.gather(*map(read, streams))

    return dict(zip(names, map(tokens_of, run(work())), strict=True))


def test_requests_go_on_after_the_engine_was_killed(client: AsyncEngine) -> None:
    expected = answers(client, "abcde")
    before = wait_until_empty(client)
    pid = client.transport.pid
    actual = run(lose_engine(client, lambda pid: os.kill(pid, signal.SIGKILL)))
    assert_answered(actual, expected)
    for name in "ab":
        metrics = [update.metrics for update in actual[name]]
        for field in ("arrival_time", "first_token_time", "scheduled_time"):
            assert len({getattr(one, field) for one in metrics}) == 1, "from the first life"
        steps = [one.num_steps for one in metrics]
        assert steps == sorted(steps)
    after = wait_until_empty(client)
    assert client.transport.pid != pid and client.is_alive and not client.restarting
    assert after.restarts_total == before.restarts_total + 1
    assert after.resumed_total == before.resumed_total + ROWS
    assert after.requests_success_total["error"] == before.requests_success_total["error"]
    assert after.requests_success_total["length"] == before.requests_success_total["length"] + 5
    counted = after.generation_tokens_total - before.generation_tokens_total
    assert counted <= 36 + ROWS * LONG, "no token counts twice"
    assert after.steps_total > before.steps_total


@pytest.mark.slow
def test_stopped_engine_is_restarted(client: AsyncEngine) -> None:
    expected = answers(client, "abcde")
    begun = time.monotonic()
    actual = run(lose_engine(client, lambda pid: os.kill(pid, signal.SIGSTOP)))
    assert_answered(actual, expected)
    assert time.monotonic() - begun > STEP_SECONDS


@pytest.mark.slow
def test_hanging_step_restarts_the_engine(client: AsyncEngine) -> None:
    """Although the process sends heartbeats. The request that hangs it again and again ends."""
    expected = answers(client, "ab")

    async def work() -> list[list[TokenUpdate]]:
        runs = client.stream(make_request("a runs", LONG))
        await anext(aiter(runs))
        hangs = client.stream(make_request("hang"))
        waits = client.stream(make_request("b waits", LONG))
        with pytest.raises(ComputeError, match="stopped 4 times while it ran request 'hang'"):
            await read(hangs)
        return await asyncio.gather(read(runs), read(waits))

    pid = client.transport.pid
    first, second = run(work())
    assert client.transport.pid != pid
    assert expected["a"][-len(tokens_of(first)) :] == tokens_of(first)
    assert tokens_of(second) == expected["b"]


def test_request_aborted_during_the_restart_does_not_come_back(client: AsyncEngine) -> None:
    expected = answers(client, "b")["b"]

    async def work() -> tuple[list[TokenUpdate], list[TokenUpdate]]:
        gone, other = (client.stream(make_request(f"{name} runs", LONG)) for name in "ab")
        for stream in (gone, other):
            await anext(aiter(stream))
        os.kill(client.transport.pid, signal.SIGKILL)
        while not client.restarting:
            await asyncio.sleep(0.001)
        client.abort("a runs")
        return await read(gone), await read(other)

    gone, other = run(work())
    assert gone[-1].finish_reason == "abort" and len(tokens_of(gone)) < LONG
    assert tokens_of(other) == expected[-len(tokens_of(other)) :]
    wait_until_empty(client)


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
    nothing = Loss(0, 0, 0)
    client.transport._restart_times.extend([time.monotonic()] * (MAX_RESTARTS - 1))
    assert client.transport._may_restart(nothing), "this one is the last"
    assert not client.transport._may_restart(nothing)
    client.start()

    async def work() -> None:
        with pytest.raises(EngineDeadError, match="the device is gone.*Restart the server"):
            await read(client.stream(make_request("die")))

    try:
        run(work())
        wait_until(lambda: bool(received))
        assert received == ["the device is gone"]
        assert not client.is_alive and not client.restarting
    finally:
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
        self.requests: list[Request] = []
        self.first: dict[str, Request] = {}
        self.receiver: Receiver

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def stop(self) -> None:
        self.receiver.ended("it was shut down", False)

    def submit(self, requests: Sequence[Request]) -> None:
        self.sent.extend(request.id for request in requests)
        self.requests.extend(requests)
        self.first = {request.id: request for request in requests} | self.first

    def abort(self, request_id: str) -> None:
        self.sent.append(f"abort {request_id}")

    def reset_prefix_cache(self) -> None:
        self.sent.append("reset")

    def stats(self) -> Stats:
        return Stats()

    def lose_engine(self) -> Loss:
        def forget() -> None:
            self.sent.clear()
            self.requests.clear()

        return self.receiver.lost(forget)


def one_token(token: int, steps: int = 1) -> TokenUpdate:
    """Return an update of one token."""
    return TokenUpdate([token], None, None, None, RequestMetrics(num_steps=steps))


def test_lost_requests_are_submitted_with_what_the_client_has() -> None:
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()

    async def work() -> None:
        names = ("begun", "waits", "gone", "late")
        streams = {name: client.stream(make_request(name)) for name in names}
        transport.receiver.deliver([("begun", one_token(1, 3)), ("nobody", one_token(1))])
        client.abort("gone")
        assert transport.sent == [*names, "abort gone"]
        assert transport.lose_engine() == Loss(num_resumed=1, num_ended=0, num_open=3)
        assert transport.sent == ["begun", "waits", "late"], "in their order"
        begun, waits, _ = transport.requests
        assert (begun.params.forced_token_ids, begun.num_resumed) == ([1], 1)
        assert (begun.seed, begun.metrics.num_steps, begun.failures) == (7, 3, 1)
        assert begun.metrics is not transport.first["begun"].metrics
        assert waits.params.forced_token_ids is None and waits.failures == 0
        transport.receiver.deliver([("begun", one_token(2, 4))])
        client.stream(make_request("new"))
        transport.lose_engine()
        assert transport.sent == ["begun", "waits", "late", "new"]
        begun = transport.requests[0]
        assert begun.params.forced_token_ids == [1, 2]
        assert begun.failures == 1, "it had a new token"
        last = TokenUpdate([3], None, "length", None, RequestMetrics(num_steps=5))
        transport.receiver.deliver([("begun", last)])
        assert tokens_of(await read(streams["begun"])) == [1, 2, 3]
        assert transport.lose_engine().num_open == 3, "what has ended is not submitted again"

    run(work())
    client.shutdown()


def test_tokens_of_an_earlier_server_are_kept_where_the_engine_is_lost() -> None:
    """A request as the journal of a server that ended gives it to the next one."""
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()

    async def work() -> None:
        request = make_request("resumed")
        params = request.params.clone(forced_token_ids=[1, 2])
        client.stream(replace(request, params=params, num_resumed=2))
        transport.receiver.deliver([("resumed", one_token(3))])
        transport.lose_engine()
        (rest,) = transport.requests
        assert (rest.params.forced_token_ids, rest.num_resumed) == ([1, 2, 3], 3)

    run(work())
    client.shutdown()


def test_request_that_waits_after_its_compilation_is_not_the_cause() -> None:
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()

    async def work() -> None:
        client.stream(make_request("innocent"))
        for _ in range(MAX_REQUEST_FAILURES):
            transport.receiver.begun(["innocent"])
            transport.receiver.compiled(["innocent", "nobody"])
            assert transport.lose_engine() == Loss(0, 0, 1)
        assert transport.requests[0].failures == 0
        transport.receiver.begun(["innocent"])
        transport.lose_engine()
        assert transport.requests[0].failures == 1

    run(work())
    client.shutdown()


def test_request_ends_with_the_last_engine_that_it_fails() -> None:
    transport = FakeTransport()
    client = AsyncEngine(transport)
    client.start()

    async def work() -> None:
        streams = {name: client.stream(make_request(name)) for name in ("bad", "waits")}
        transport.receiver.deliver([("bad", one_token(1))])
        for failures in range(1, MAX_REQUEST_FAILURES):
            assert transport.lose_engine() == Loss(1, 0, 2)
            assert transport.requests[0].failures == failures
            transport.receiver.begun(["bad", "nobody"])
        assert transport.requests[0].is_suspect and not transport.requests[1].is_suspect
        assert transport.lose_engine() == Loss(0, 1, 1)
        assert transport.sent == ["waits"]
        with pytest.raises(ComputeError, match="stopped 4 times while it ran request 'bad'"):
            await read(streams["bad"])
        for _ in range(MAX_REQUEST_FAILURES):
            assert transport.lose_engine() == Loss(0, 0, 1), "no engine worked on it"

    run(work())
    client.shutdown()


def test_engine_that_serves_is_restarted_without_limit(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is lost without an update, or while it has nothing to do, counts. An audit and
    a request that ends explain losses, but not those of many requests in a row.
    """
    transport = client.transport
    serving, idle, explained = Loss(1, 0, 1), Loss(0, 0, 0), Loss(0, 1, 1)
    monkeypatch.setattr(transport, "_has_served", True)
    assert all(transport._may_restart(serving) for _ in range(2 * MAX_RESTARTS))
    assert [transport._may_restart(idle) for _ in range(4)] == [True, True, True, False]
    transport._take(Began(["audit-a"]))
    assert all(transport._may_restart(idle) for _ in range(MAX_RESTARTS))
    transport._take(Idle())
    assert transport._may_restart(serving) and transport._may_restart(idle)
    transport._has_served = False
    assert [transport._may_restart(serving) for _ in range(3)] == [True, True, False]
    assert transport._may_restart(explained) and transport._may_restart(serving)
    ends = [transport._may_restart(explained) for _ in range(MAX_FAILED_REQUESTS)]
    assert ends == [True] * (MAX_FAILED_REQUESTS - 1) + [False]


def test_request_that_cannot_be_pickled_is_refused_alone(client: AsyncEngine) -> None:
    """Otherwise the thread that sends commands would end, and all requests would wait for ever."""

    async def work() -> None:
        odd, plain = make_request("odd"), make_request("plain")
        odd.params.logit_bias = MappingProxyType({5: 1.0})  # type: ignore[assignment]
        streams = {request.id: Stream() for request in (odd, plain)}
        client.submit([(request, streams[request.id].put) for request in (odd, plain)])
        with pytest.raises(RequestError, match="cannot be sent to the engine: .*mappingproxy"):
            await read(streams["odd"])
        assert (await read(streams["plain"]))[-1].finish_reason == "length"

        assert tokens_of(await read(client.stream(make_request("later"))))

    run(work())


def test_form_that_a_grammar_replaces_is_not_sent() -> None:
    """Its schema may have mappings of any class, which the engine's process cannot import."""
    request = make_request("a")
    schema = defaultdict(lambda: "object", type="object")
    request.params = SamplingParams(structured_outputs={"json": schema})
    request.grammar = Mock(recipe="recipe")
    received = pickle.loads(pickle.dumps(EngineRequest.of(request)))
    assert (received.grammar, received.params) == ("recipe", SamplingParams())


def test_engine_is_idle_after_a_grammar_that_cannot_be_compiled(client: AsyncEngine) -> None:
    """Else a loss of the idle engine would count as one during work, and never be final."""

    async def work() -> None:
        request = make_request("broken")
        request.grammar = Mock(recipe="none")
        with pytest.raises((RequestError, RuntimeError, AttributeError)):
            await read(client.stream(request))

    run(work())
    wait_until(lambda: not client.transport._begun_ids)
    assert wait_until_empty(client).num_waiting == 0


def test_id_is_free_when_the_error_of_its_grammar_is_delivered() -> None:
    """A client may submit a request with the same id at once, which must not be aborted."""
    host = Mock()
    host._make_grammar.side_effect = ValueError
    _Host._compile(host, make_request("a"), "recipe")
    names = [name for name, *_ in host.mock_calls]
    assert names.index("_loop.abort") < names.index("_deliver")


def test_audits_stop_where_they_end_engines(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next engine then begins with the command that stops audits."""
    transport = client.transport
    monkeypatch.setattr(transport, "_commands", SimpleQueue())
    monkeypatch.setattr(transport, "_has_served", True)
    nothing = Loss(0, 0, 0)
    for number in range(MAX_RESTARTS):
        assert transport._commands.empty()
        transport._take(Began([f"audit-{number}"]))
        assert transport._may_restart(nothing)
        transport._take(Idle())
    assert "audit-2" in caplog.text and transport._commands.get() == StopAudits()
    transport._drop_commands()
    assert transport._commands.get() == StopAudits() and transport._commands.empty()
    transport._take(Began(["aborted"]))
    ends = [transport._may_restart(nothing) for _ in range(MAX_RESTARTS + 1)]
    assert ends == [True] * MAX_RESTARTS + [False], "it is no audit"


def test_requests_end_where_no_engine_can_be_started(
    settings: dict[str, Any], forked_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine cannot be started, for example, if memory is too short for another process."""

    def fail(*arguments: object) -> None:
        raise OSError("Cannot allocate memory")

    client = AsyncEngine(ProcessTransport(partial(engine_factories.plain, settings), STEP_SECONDS))
    client.start()

    async def work() -> None:
        stream = client.stream(make_request("long", LONG))
        await anext(aiter(stream))
        monkeypatch.setattr(process_transport, "_Child", fail)
        os.kill(client.transport.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="started again: Cannot allocate memory"):
            await read(stream)

    try:
        run(work())
        assert not client.is_alive
    finally:
        client.shutdown()


def test_requests_end_where_reports_cannot_be_handled(
    settings: dict[str, Any], forked_processes: None
) -> None:
    client = AsyncEngine(ProcessTransport(partial(engine_factories.plain, settings), STEP_SECONDS))
    client.start()

    async def work() -> None:
        stream = client.stream(make_request("long", LONG))
        os.kill(client.transport.pid, signal.SIGSTOP)
        client.transport._take = None
        os.kill(client.transport.pid, signal.SIGCONT)
        with pytest.raises(EngineDeadError, match="its reports could not be handled"):
            await read(stream)

    try:
        run(work())
    finally:
        client.shutdown()


def test_partial_message_ends_the_reports() -> None:
    """A process that is stopped while it writes leaves a partial message."""
    mine, other = Pipe()
    with mine, other:
        limit_receiving(mine, 0.1)
        other.send("whole")
        assert mine.recv() == "whole"
        os.write(other.fileno(), b"\0\0")
        with pytest.raises(OSError):
            mine.recv()


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
    request.num_resumed = 4
    request.failures = 1
    request.metrics.num_steps = 2
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


@pytest.mark.parametrize(("error", "status"), [("_receive", 0), ("_execute", 1)])
def test_engine_process_fails_at_a_system_error_of_a_command(
    error: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed pipe says that the server is gone; the same error of a command does not."""
    host = object.__new__(engine_process._Host)
    host._connection = Mock()
    if error == "_receive":
        host._connection.recv.side_effect = OSError("closed")
    else:
        monkeypatch.setattr(host, "_execute", Mock(side_effect=OSError("out of files")))
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        host._read()
    assert end.value.code == status
