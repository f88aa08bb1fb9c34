"""AsyncEngine with many callers, over an engine in a thread and in a process."""

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine, Stream
from lockstep.engine.process_transport import ProcessTransport
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.engine.token_update import TokenUpdate
from lockstep.engine_builder import build_engine
from lockstep.errors import CapacityError, EngineDeadError, RequestError
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.worker.worker import Worker
from tests.engine_factories import PATIENCE, plain, run, wait_until_empty
from tests.tiny_model import TWO_LAYERS, make_model

LONG = 3000


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of a tiny engine with two rows that drafts by n-grams."""
    return {
        "model": str(make_model(tmp_path_factory.mktemp("client"), **TWO_LAYERS)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 2,
        "num_gpu_blocks": 60,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }


@pytest.fixture(scope="module")
def shared_process(settings: dict[str, Any], forked_processes: None) -> Iterator[AsyncEngine]:
    """Yield a started client of an engine in its own process; a start takes seconds."""
    result = AsyncEngine(ProcessTransport(partial(plain, settings), PATIENCE))
    result.start()
    yield result
    result.shutdown()
    assert not result.is_alive


@pytest.fixture
def threaded(settings: dict[str, Any]) -> Iterator[AsyncEngine]:
    """Yield a started client over a fresh engine in a thread."""
    result = AsyncEngine(ThreadTransport(build_engine(EngineConfig.read(**settings))))
    result.start()
    yield result
    result.shutdown()
    assert not result.is_alive


@pytest.fixture(params=["threaded", "shared_process"])
def client(request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    """Yield each client, for the contract that both follow; assert afterwards that it is empty."""
    result = request.getfixturevalue(request.param)
    yield result
    assert_becomes_empty(result)


def make_request(
    name: str, max_tokens: int = 12, prompt: list[int] | None = None, **params: Any
) -> Request:
    """Return a request with a prompt that depends on the name's first letter only."""
    ids = prompt or [ord(name[0]) % 90 + i % 7 for i in range(20)]
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    return Request(name, ids, SamplingParams(**params))


async def read(stream: Stream) -> list[TokenUpdate]:
    """Return all updates of a stream."""
    return [update async for update in stream]


async def first(stream: Stream) -> TokenUpdate:
    """Return the next update of a stream, which continues."""
    return await anext(aiter(stream))


def tokens_of(updates: list[TokenUpdate]) -> list[int]:
    """Return the tokens of all updates."""
    return [token for update in updates for token in update.token_ids]


def answer_alone(client: AsyncEngine, request: Request) -> list[int]:
    """Return the answer to a request that runs alone."""

    async def work() -> list[int]:
        return tokens_of(await read(client.stream(request)))

    return run(work())


def assert_becomes_empty(client: AsyncEngine) -> None:
    """Assert that the engine is alive and soon has no request."""
    assert client.is_alive
    wait_until_empty(client)


def assert_answers(client: AsyncEngine, expected: list[int]) -> None:
    """Assert that the engine still answers request a as before, and becomes empty."""
    assert answer_alone(client, make_request("a again")) == expected
    assert_becomes_empty(client)


def test_concurrent_streams_get_their_own_tokens_incrementally(client: AsyncEngine) -> None:
    names = list("abcde")
    expected = {name: answer_alone(client, make_request(name)) for name in names}
    assert len({tuple(x) for x in expected.values()}) == len(names)

    async def work() -> list[list[TokenUpdate]]:
        return await asyncio.gather(
            *(read(client.stream(make_request(name + "2"))) for name in names)
        )

    for name, updates in zip(names, run(work()), strict=True):
        assert tokens_of(updates) == expected[name] and len(expected[name]) == 12
        assert len(updates) >= 4 and all(update.token_ids for update in updates)
        assert [u.finish_reason for u in updates] == [None] * (len(updates) - 1) + ["length"]
        assert all(u.logprobs is None and u.prompt_logprobs is None for u in updates)
        assert updates[-1].metrics.num_steps >= len(updates) - 1


@pytest.mark.default_cases("threaded")
def test_reset_prefix_cache_keeps_running_requests(client: AsyncEngine) -> None:
    prompt = [i * 7 % 90 for i in range(400)]
    expected = answer_alone(client, make_request("r alone", 80, prompt))

    async def work() -> tuple[list[int], list[int | None]]:
        running = client.stream(make_request("r running", 80, prompt))
        received = [await first(running)]
        hits = []
        for name in ("r cached", "r new", "r again"):
            if name == "r new":
                client.reset_prefix_cache()
            updates = await read(client.stream(make_request(name, 2, prompt)))
            hits.append(updates[-1].metrics.num_cached_tokens)
        return tokens_of(received + await read(running)), hits

    tokens, hits = run(work())
    assert tokens == expected
    assert hits[1] == 0 < min(hits[0], hits[2])


def test_logprobs_per_update_and_prompt_logprobs_once(client: AsyncEngine) -> None:
    request = make_request("a", logprobs=1, prompt_logprobs=0)

    async def work() -> list[TokenUpdate]:
        return await read(client.stream(request))

    updates = run(work())
    for update in updates:
        assert update.logprobs is not None and len(update.logprobs) == len(update.token_ids)
        for token, entry in zip(update.token_ids, update.logprobs, strict=True):
            assert token in entry
    scores = updates[0].prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == 20
    assert all(update.prompt_logprobs is None for update in updates[1:])


def test_stop_token_is_the_stop_reason(client: AsyncEngine) -> None:
    stop = answer_alone(client, make_request("a"))[3]

    async def work() -> TokenUpdate:
        return (await read(client.stream(make_request("a3", stop_token_ids=[stop]))))[-1]

    last = run(work())
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_updates_are_immutable(threaded: AsyncEngine) -> None:
    """A caller that reads each update at once, and one that reads all of them after the end, get
    the same."""
    params = {"logprobs": 1, "prompt_logprobs": 0}

    async def at_once() -> list[str]:
        return [repr(update) async for update in threaded.stream(make_request("a", **params))]

    async def late() -> list[str]:
        request = make_request("a", **params)
        stream = threaded.stream(request)
        while request.finish_reason is None or threaded.num_open:
            await asyncio.sleep(0.001)
        updates = await read(stream)
        assert updates[-1].metrics is not request.metrics
        shared = [request.output_token_ids, request.logprobs, request.prompt_logprobs]
        retained = [x for u in updates for x in (u.token_ids, u.logprobs, u.prompt_logprobs)]
        assert not {id(x) for x in shared} & {id(x) for x in retained}
        with pytest.raises(AttributeError):
            updates[0].finish_reason = "stop"  # type: ignore[misc]
        return [repr(update) for update in updates]

    def timeless(updates: list[str]) -> list[str]:
        return [re.sub(r"(\w+_time|num_cached_tokens)=[^,)]+", r"\1", item) for item in updates]

    answer_alone(threaded, make_request("a"))
    one = run(at_once())
    other = run(late())
    steps = [re.findall(r"num_steps=(\d+)", item)[0] for item in one]
    assert timeless(one) == timeless(other) and len(set(steps)) == len(steps) > 3


def test_abort_ends_only_its_stream(client: AsyncEngine) -> None:
    before = wait_until_empty(client).requests_success_total["abort"]
    expected = answer_alone(client, make_request("a"))

    async def work() -> tuple[list[TokenUpdate], ...]:
        long = client.stream(make_request("long", LONG))
        other = client.stream(make_request("other", LONG))
        waiting = client.stream(make_request("a1"))
        start = [await first(long)]
        client.abort("long")
        rest = await read(long)
        answered = await read(waiting)
        client.abort("other")
        client.abort("nobody")
        return start + rest, answered, await read(other)

    aborted, answered, other = run(work())
    assert aborted[-1].finish_reason == other[-1].finish_reason == "abort"
    assert aborted[-1].token_ids == [] and 0 < len(tokens_of(aborted)) < LONG
    assert tokens_of(answered) == expected, "the third request came into the free row"
    assert_answers(client, expected)
    counted = client.stats().requests_success_total["abort"] - before
    assert counted == 2


def test_abort_of_new_request(client: AsyncEngine) -> None:
    async def work() -> list[TokenUpdate]:
        stream = client.stream(make_request("long", LONG))
        client.abort("long")
        return await read(stream)

    (only,) = run(work())
    assert (only.token_ids, only.finish_reason) == ([], "abort")
    assert_answers(client, answer_alone(client, make_request("a")))


def test_abandoned_stream_does_not_disturb_others(client: AsyncEngine) -> None:
    expected = answer_alone(client, make_request("a"))
    run(first_of(client, make_request("gone", 40)))
    assert_answers(client, expected)


async def first_of(client: AsyncEngine, request: Request) -> TokenUpdate:
    """Return the first update of a request, whose event loop then closes while it runs."""
    return await first(client.stream(request))


BAD: list[tuple[Callable[[], Request], type[Exception], str]] = [
    (lambda: make_request("bad", prompt=[1] * 4096), RequestError, "prompt has 4096 tokens"),
    (lambda: make_request("bad", prompt=[1] * 3900), CapacityError, "59 pages of 64"),
    (lambda: make_request("bad", prompt=[10**6]), RequestError, "prompt has token id 1000000"),
    (
        lambda: make_request("bad", allowed_token_ids=[-1]),
        RequestError,
        "allowed_token_ids has token id -1",
    ),
    (lambda: make_request("bad", logit_bias={10**6: 1.0}), RequestError, "logit_bias"),
    (lambda: make_request("busy"), RequestError, "request_id='busy'"),
    (lambda: make_request("bad", prompt=["x"]), ValueError, "x"),  # type: ignore[list-item]
    (lambda: make_request("bad", prompt=[None]), TypeError, "None"),  # type: ignore[list-item]
]


def test_invalid_request_raises_without_affecting_others(client: AsyncEngine) -> None:
    expected = answer_alone(client, make_request("a"))
    beginning = answer_alone(client, make_request("b"))

    async def work() -> tuple[list[TokenUpdate], list[TokenUpdate]]:
        busy = client.stream(make_request("busy", LONG))
        for bad, kind, reports in BAD:
            with pytest.raises(kind, match=reports):
                await read(client.stream(bad()))
        good = await read(client.stream(make_request("a1")))
        client.abort("busy")
        return good, await read(busy)

    good, busy = run(work())
    assert tokens_of(good) == expected
    received = tokens_of(busy)[: len(beginning)]
    assert received and received == beginning[: len(received)]
    assert busy[-1].finish_reason == "abort"
    assert_answers(client, expected)


def test_engine_failure_reaches_every_stream(
    threaded: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests, one that waits for a row, and one that the engine has not received yet."""
    step = threaded.transport.engine.step
    entered = threading.Event()
    go = threading.Event()

    def fail() -> list[Request]:
        if not entered.is_set() and threaded.transport.engine.scheduler.num_running < 2:
            return step()
        entered.set()
        assert go.wait(PATIENCE)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(threaded.transport.engine, "step", fail)
    monkeypatch.setattr(Worker, "probe", fail)

    async def work() -> None:
        streams = [threaded.stream(make_request(name, LONG)) for name in ("a", "b", "c")]
        await asyncio.to_thread(entered.wait, PATIENCE)
        streams.append(threaded.stream(make_request("late", LONG)))
        go.set()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="so did an empty one.*Restart"):
                await read(stream)
        threaded.transport._thread.join(PATIENCE)
        assert not threaded.is_alive
        with pytest.raises(EngineDeadError, match="so did an empty one.*Restart"):
            threaded.stream(make_request("after"))
        threaded.abort("a")

    run(work())


def test_shutdown_ends_open_streams(threaded: AsyncEngine) -> None:
    async def work() -> None:
        streams = [threaded.stream(make_request(name, LONG)) for name in ("a", "b", "c")]
        await first(streams[0])
        await asyncio.to_thread(threaded.shutdown)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="shut down"):
                await read(stream)
        with pytest.raises(EngineDeadError, match="shut down"):
            threaded.stream(make_request("after"))

    run(work())
    assert not threaded.transport._thread.is_alive()
    threaded.shutdown()


def test_requests_after_shutdown_are_refused(
    threaded: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = threaded.transport.engine.step
    entered = threading.Event()
    go = threading.Event()

    def slow() -> list[Request]:
        entered.set()
        assert go.wait(PATIENCE)
        return step()

    monkeypatch.setattr(threaded.transport.engine, "step", slow)

    async def work() -> None:
        running = threaded.stream(make_request("a", LONG))
        await asyncio.to_thread(entered.wait, PATIENCE)
        ending = asyncio.create_task(asyncio.to_thread(threaded.shutdown))
        while threaded.transport.loop._commands.empty():
            await asyncio.sleep(0.001)
        late = threaded.stream(make_request("late", LONG))
        go.set()
        for stream in (running, late):
            with pytest.raises(EngineDeadError, match="shut down"):
                await read(stream)
        await ending

    run(work())


def test_client_must_be_started(settings: dict[str, Any]) -> None:
    idle = AsyncEngine(ThreadTransport(build_engine(EngineConfig.read(**settings))))
    assert not idle.is_alive

    async def work() -> None:
        idle.stream(make_request("a"))

    with pytest.raises(EngineDeadError, match="start"):
        run(work())
    idle.shutdown()


def test_stats_are_copies_available_at_any_time(threaded: AsyncEngine) -> None:
    interval = sys.getswitchinterval()
    taken = []

    async def work() -> None:
        streams = [threaded.stream(make_request(name)) for name in "abcde"]
        reading = asyncio.gather(*map(read, streams))
        while not reading.done():
            taken.append(await asyncio.to_thread(threaded.stats))
        await reading

    sys.setswitchinterval(1e-5)
    try:
        run(work())
    finally:
        sys.setswitchinterval(interval)
    taken.append(threaded.stats())
    for earlier, later in zip(taken, taken[1:], strict=False):
        assert earlier.generation_tokens_total <= later.generation_tokens_total
        assert earlier.requests_success_total is not later.requests_success_total
    last = taken[-1]
    assert last.generation_tokens_total == 5 * 12
    assert last.requests_success_total == {"length": 5}
    assert sum(len(stats.ttft_seconds) for stats in taken) == 5
    assert sum(len(stats.e2e_seconds) for stats in taken) == 5
    assert (last.num_running, last.num_waiting, last.num_swapped, last.pages_used) == (0, 0, 0, 0)
    assert max(stats.num_running for stats in taken) == 2
    assert max(stats.pages_used for stats in taken) >= 2 and last.pages == 59
    assert threaded.stats().e2e_seconds == []


def test_stats_are_atomic_per_step(threaded: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader in another thread sees all counters of a step change at once."""
    live = threaded.transport.engine.stats
    observe = threaded.transport.engine.stats.observe

    def slowly(name: str, seconds: float) -> None:
        observe(name, seconds)
        time.sleep(0.002)

    monkeypatch.setattr(live, "observe", slowly)
    taken = []

    async def work() -> None:
        reading = asyncio.gather(*(read(threaded.stream(make_request(name))) for name in "abcde"))
        while not reading.done():
            taken.append(await asyncio.to_thread(threaded.stats))
        await reading

    run(work())
    taken.append(threaded.stats())
    ended = 0
    for stats in taken:
        ended += len(stats.e2e_seconds)
        assert ended == stats.requests_success_total["length"]
        of_running = stats.generation_tokens_total - 12 * ended
        assert 0 <= of_running <= 11 * stats.num_running
        assert stats.num_waiting >= 0
    assert ended == 5 and len(taken) > 10
