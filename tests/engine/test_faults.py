"""Requests go on after a failed step; one that fails every step ends alone; an engine that cannot
continue stops with the reason."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.engine import MAX_FAILURES, Engine
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import ComputeError, EngineDeadError
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import MAX_FAILED_REQUESTS, MAX_REQUEST_FAILURES, Request
from lockstep.worker.executor import worker_of
from lockstep.worker.program import RunStep
from tests.bundled_model import make_engine
from tests.tiny_model import TWO_LAYERS, make_model

PATIENCE = 60
SECRET = "RuntimeError('device 0x7f lost')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny model's folder."""
    return str(make_model(tmp_path_factory.mktemp("faults"), **TWO_LAYERS))


def make_tiny_engine(folder: str, **settings: Any) -> Engine:
    """Return a tiny engine of two rows that runs two steps ahead and drafts by n-grams."""
    chosen = {"max_num_seqs": 2, "num_gpu_blocks": 60, "steps_in_flight": 2, **settings}
    more = {"load_format": "dummy", "skip_tokenizer_init": True}
    return make_engine("ngram", model=folder, **more, **chosen).engine


@pytest.fixture(scope="module")
def engine(folder: str) -> Engine:
    """Return an engine that the tests make fail, one after the other."""
    return make_tiny_engine(folder)


@pytest.fixture
def client(engine: Engine) -> Iterator[AsyncEngine]:
    """Yield a started client over the engine; assert afterwards that the engine is empty."""
    result = AsyncEngine(ThreadTransport(engine))
    result.start()
    yield result
    result.shutdown()
    engine.clear()
    assert not engine.scheduler.cache.seqs and not worker_of(engine).saved
    assert len(engine.scheduler.free_rows) == 2
    engine.scheduler.cache.check()
    engine._failures = engine._failed_requests = 0


def make_request(name: str, max_tokens: int = 12) -> Request:
    """Return a greedy request of 100 tokens, which depend on the name's first letter only."""
    ids = [ord(name[0]) % 90 + i % 7 for i in range(100)]
    return Request(name, ids, SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens))


async def read(client: AsyncEngine, request: Request) -> list[TokenUpdate]:
    """Return all updates of a request."""
    return [update async for update in client.stream(request)]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def tokens_of(updates: list[TokenUpdate]) -> list[int]:
    """Return the tokens of all updates."""
    return [token for update in updates for token in update.token_ids]


def answer(client: AsyncEngine, name: str, max_tokens: int = 12) -> list[int]:
    """Return the tokens of one request that runs alone."""
    return tokens_of(run(read(client, make_request(name, max_tokens))))


def fail_once(inner: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    """Return a function that calls `inner`, but raises the first time that `when` is true."""
    failed: list[bool] = []

    def call(*arguments: Any) -> Any:
        if not failed and when():
            failed.append(True)
            raise RuntimeError(SECRET)
        return inner(*arguments)

    return call


@pytest.mark.parametrize(
    ("owner", "name"),
    [("worker", "launch"), ("worker", "collect"), ("worker", "run_step"), ("scheduler", "update")],
)
def test_requests_go_on_after_a_failed_step(
    client: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: str,
    name: str,
) -> None:
    engine = client.transport.engine
    expected = {name: answer(client, name, 12 if name == "c" else 80) for name in "abc"}
    before = engine.drain_stats()
    running = [make_request("a", 80), make_request("b", 80)]

    def both_run() -> bool:
        return all(r.output_token_ids for r in running)

    patched = worker_of(engine) if owner == "worker" else engine.scheduler
    inner = getattr(patched, name)
    if name == "run_step":
        failing: Any = RunStep(fail_once(inner.forward, both_run), inner.decide)
    else:
        failing = fail_once(inner, both_run)
    monkeypatch.setattr(patched, name, failing)

    async def work() -> tuple[list[list[TokenUpdate]], list[TokenUpdate]]:
        ending = [asyncio.create_task(read(client, r)) for r in running]
        while not engine.scheduler.num_running == 2:
            await asyncio.sleep(0.001)
        waiting = await read(client, make_request("c"))
        return await asyncio.gather(*ending), waiting

    with caplog.at_level(logging.ERROR):
        (first, second), waited = run(work())
    for name, updates in {"a": first, "b": second, "c": waited}.items():
        assert tokens_of(updates) == expected[name]
        assert all(update.token_ids and update.error is None for update in updates)
        sources = [source for update in updates for source in update.token_sources]
        assert len(sources) == len(expected[name]) and "forced" not in sources
    assert waited[-1].metrics.num_cached_tokens == 0, "no prefix may be trusted after a failure"
    assert SECRET in caplog.text and "Traceback" in caplog.text
    assert client.is_alive and answer(client, "c again") == expected["c"]
    after = client.stats()
    assert after.resumed_total == before.resumed_total + 2
    assert after.requests_success_total["error"] == before.requests_success_total["error"]
    assert after.generation_tokens_total == before.generation_tokens_total + 80 + 80 + 12 + 12
    assert after.prompt_tokens_total == before.prompt_tokens_total + 400
    assert len(after.ttft_seconds) == 4, "a first token comes once"
    assert engine._failures == 0


def test_first_metrics_stay_after_a_failed_step(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(client.transport.engine)
    request = make_request("a", 40)
    launch = fail_once(worker.launch, lambda: len(request.output_token_ids) >= 10)
    monkeypatch.setattr(worker, "launch", launch)
    updates = run(read(client, request))
    assert request.num_resumed >= 10, "it went on from there"
    metrics = [update.metrics for update in updates]
    for name in ("arrival_time", "first_token_time", "scheduled_time", "num_cached_tokens"):
        assert len({getattr(one, name) for one in metrics}) == 1
    steps = [one.num_steps for one in metrics]
    assert steps == sorted(steps)


def test_request_that_fails_its_steps_ends_alone(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails every step that computes its tenth token. Both rows are suspects until one of them
    has gone on alone."""
    engine = client.transport.engine
    expected = {name: answer(client, name, 60) for name in "bc"}
    bad = make_request("a", 60)
    launch = worker_of(engine).launch

    def fail(schedule: Any, fill_masks: Any) -> Any:
        entry = engine.scheduler.entries.get(bad.id)
        if entry is not None and entry.row and entry.max_committed >= 110:
            raise RuntimeError(SECRET)
        return launch(schedule, fill_masks)

    monkeypatch.setattr(worker_of(engine), "launch", fail)

    async def work() -> list[Any]:
        requests = [bad, make_request("b", 60), make_request("c", 60)]
        return await asyncio.gather(
            *(read(client, request) for request in requests), return_exceptions=True
        )

    error, *answers_of_others = run(work())
    assert isinstance(error, ComputeError) and SECRET not in str(error)
    assert f"stopped {MAX_REQUEST_FAILURES} times while it ran request 'a'" in str(error)
    assert [tokens_of(updates) for updates in answers_of_others] == list(expected.values())
    assert client.is_alive and engine._failures == 0


def test_three_requests_that_fail_their_steps_end_alone(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests fail their first steps, one after the other, and no step succeeds between."""
    engine = client.transport.engine
    expected = answer(client, "b", 40)
    guilty = ["a", "c", "d"]
    launch = worker_of(engine).launch

    def fail(schedule: Any, fill_masks: Any) -> Any:
        if any(entry.request.id in guilty for entry in engine.scheduler.running):
            raise RuntimeError(SECRET)
        return launch(schedule, fill_masks)

    monkeypatch.setattr(worker_of(engine), "launch", fail)

    async def work() -> list[Any]:
        requests = [make_request(name, 40) for name in (*guilty, "b")]
        return await asyncio.gather(
            *(read(client, request) for request in requests), return_exceptions=True
        )

    *errors, updates = run(work())
    for name, error in zip(guilty, errors, strict=True):
        assert isinstance(error, ComputeError) and f"while it ran request '{name}'" in str(error)
    assert tokens_of(updates) == expected
    assert client.is_alive and engine._failures == engine._failed_requests == 0


def test_abort_of_a_suspect_frees_the_others(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = client.transport.engine
    expected = answer(client, "b", 40)
    requests = [make_request("a", 40), make_request("b", 40)]
    failed: list[int] = []
    launch = worker_of(engine).launch

    def fail_twice(schedule: Any, fill_masks: Any) -> Any:
        if len(failed) < 2 and engine.scheduler.num_running == 2:
            failed.append(schedule.tick)
            raise RuntimeError(SECRET)
        if len(failed) == 2 and not requests[0].finish_reason:
            assert engine.scheduler.num_running == 1, "the first suspect runs alone"
            client.abort("a")
        return launch(schedule, fill_masks)

    monkeypatch.setattr(worker_of(engine), "launch", fail_twice)

    async def work() -> list[list[TokenUpdate]]:
        return await asyncio.gather(*(read(client, request) for request in requests))

    aborted, other = run(work())
    assert aborted[-1].finish_reason == "abort"
    assert tokens_of(other) == expected and not engine.scheduler.suspects


def test_preempted_requests_go_on_after_a_failed_step(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five pages hold two prompts of two pages, but not both answers."""
    engine = make_tiny_engine(folder, num_gpu_blocks=6)
    alone = [make_request("a", 60), make_request("b", 60)]
    for request in alone:
        engine.run([request], lambda _: None)
    requests = [make_request("a", 60), make_request("b", 60)]
    for request in requests:
        engine.add(request)
    while not worker_of(engine).saved:
        assert engine.has_work()
        engine.step()
    monkeypatch.setattr(
        worker_of(engine),
        "launch",
        fail_once(worker_of(engine).launch, lambda: True),
    )
    with pytest.raises(RuntimeError):
        while engine.has_work():
            engine.step()
    assert not engine.recover()
    assert not engine.scheduler.preempted and engine.scheduler.num_waiting == 2
    while engine.has_work():
        engine.step()
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in alone]
    assert not worker_of(engine).saved
    engine.scheduler.cache.check()


def death_reason(client: AsyncEngine, reasons: list[str]) -> str:
    """Return the reason of an engine's end; assert that all callers get it, and on_end once."""
    errors = []

    async def work() -> None:
        results = await asyncio.gather(
            *(read(client, make_request(n)) for n in "abcdefghijkl"), return_exceptions=True
        )
        errors.extend(r for r in results if isinstance(r, BaseException))
        with pytest.raises(EngineDeadError, match="Restart the server"):
            client.stream(make_request("late"))

    run(work())
    client.transport._thread.join(PATIENCE)
    assert (
        not client.is_alive and not client.transport._thread.is_alive() and client.stalled_for == 0
    )
    ended_alone = [error for error in errors if isinstance(error, ComputeError)]
    assert len(ended_alone) <= MAX_FAILED_REQUESTS
    dead = [error for error in errors if error not in ended_alone]
    assert dead and all(isinstance(error, EngineDeadError) for error in dead)
    assert len(reasons) == 1 and SECRET not in str(errors)
    assert str(dead[0]) == f"the engine has stopped: {reasons[0]}. Restart the server."
    return reasons[0]


def test_repeated_step_failures_end_the_engine(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    client.on_end = reasons.append
    monkeypatch.setattr(worker_of(client.transport.engine), "launch", always_fails)
    reason = death_reason(client, reasons)
    assert reason == f"{MAX_FAILED_REQUESTS + 1} requests in a row failed"


def test_failures_that_no_request_explains_end_the_engine(engine: Engine) -> None:
    for _ in range(MAX_FAILURES - 1):
        assert engine.recover() == []
    with pytest.raises(EngineDeadError, match=f"{MAX_FAILURES} steps in a row failed"):
        engine.recover()
    engine._failures = 0


def test_failed_probe_step_ends_the_engine(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    client.on_end = reasons.append
    run_step = RunStep(always_fails, always_fails)
    monkeypatch.setattr(worker_of(client.transport.engine), "run_step", run_step)
    assert death_reason(client, reasons) == "a step failed, and so did an empty one after it"


def test_inconsistent_cache_ends_the_engine(engine: Engine) -> None:
    pool = engine.scheduler.cache.paged.pool
    lost = pool.free.pop()
    try:
        with pytest.raises(EngineDeadError):
            engine.recover()
    finally:
        pool.free.append(lost)
        engine._failures = engine._failed_requests = 0


def always_fails(*_: Any) -> Any:
    """Raise, as a step on a lost device does."""
    raise RuntimeError(SECRET)


def test_shutdown_does_not_call_on_end(client: AsyncEngine) -> None:
    reasons: list[str] = []
    client.on_end = reasons.append
    client.shutdown()
    assert not client.is_alive and not reasons


def test_hanging_step_is_reported_as_stalled(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = worker_of(client.transport.engine).launch
    entered = threading.Event()
    go = threading.Event()

    def hang(*arguments: Any) -> Any:
        entered.set()
        assert go.wait(PATIENCE)
        return launch(*arguments)

    assert client.stalled_for == 0
    monkeypatch.setattr(worker_of(client.transport.engine), "launch", hang)

    async def work() -> list[TokenUpdate]:
        reading = asyncio.create_task(read(client, make_request("a")))
        await asyncio.to_thread(entered.wait, PATIENCE)
        begin = time.monotonic()
        stalled = client.stalled_for
        await asyncio.sleep(0.05)
        assert stalled >= 0 and 0.05 <= client.stalled_for - stalled <= time.monotonic() - begin
        assert client.is_alive and client.stats().num_running == 1
        go.set()
        return await reading

    assert run(work())[-1].finish_reason == "length"
    assert client.stalled_for == 0
