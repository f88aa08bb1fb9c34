"""A failed step ends only its requests; an engine that cannot continue stops with the reason."""

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
from lockstep.errors import EngineDeadError
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.worker.executor import worker_of
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
    """Yield a started client over the engine; assert afterwards that the engine holds nothing."""
    result = AsyncEngine(ThreadTransport(engine))
    result.start()
    yield result
    result.shutdown()
    engine.clear()
    assert not engine.scheduler.cache.seqs and not worker_of(engine).saved
    assert len(engine.scheduler.free_rows) == 2
    engine.scheduler.cache.check()
    engine._failures = 0


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


def answer(client: AsyncEngine, name: str) -> list[int]:
    """Return the tokens of one request that runs alone."""
    return [token for update in run(read(client, make_request(name))) for token in update.token_ids]


def fail_once(inner: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    """Return a function that calls `inner`, but raises the first time that `when` holds."""
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
def test_failed_step_ends_only_its_requests(
    client: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: str,
    name: str,
) -> None:
    engine = client.transport.engine
    expected = answer(client, "c")
    before = engine.stats.requests_success_total["error"]
    running = [make_request("a", 300), make_request("b", 300)]

    def both_run() -> bool:
        return all(r.output_token_ids for r in running)

    patched = worker_of(engine) if owner == "worker" else engine.scheduler
    monkeypatch.setattr(patched, name, fail_once(getattr(patched, name), both_run))

    async def work() -> tuple[list[list[TokenUpdate]], list[TokenUpdate]]:
        ending = [asyncio.create_task(read(client, r)) for r in running]
        while not engine.scheduler.num_running == 2:
            await asyncio.sleep(0.001)
        waiting = await read(client, make_request("c"))
        return await asyncio.gather(*ending), waiting

    with caplog.at_level(logging.ERROR):
        ended, waited = run(work())
    for updates in ended:
        last = updates[-1]
        assert (last.finish_reason, last.token_ids) == ("error", [])
        assert last.error is not None and "Send the request again" in last.error
        assert SECRET not in last.error and all(u.error is None for u in updates[:-1])
    assert [t for u in waited for t in u.token_ids] == expected
    assert waited[-1].metrics.num_cached_tokens == 0, "no prefix may be trusted after a failure"
    assert SECRET in caplog.text and "Traceback" in caplog.text
    assert client.is_alive and answer(client, "c again") == expected
    assert client.stats().requests_success_total["error"] == before + 2
    assert engine._failures == 0


def test_failed_step_ends_preempted_requests(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pages hold two prompts of two pages, but not both answers."""
    engine = make_tiny_engine(folder, num_gpu_blocks=6)
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
    assert {r.id for r in engine.recover()} == {"a", "b"}
    assert all(r.finish_reason == "error" for r in requests)
    engine.step()  # tells the worker to drop the saved rows
    assert not engine.has_work() and not worker_of(engine).saved
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
    assert errors and all(isinstance(error, EngineDeadError) for error in errors)
    assert len(reasons) == 1 and SECRET not in str(errors[0])
    assert str(errors[0]) == f"the engine has stopped: {reasons[0]}. Restart the server."
    return reasons[0]


def test_repeated_step_failures_end_the_engine(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    client.on_end = reasons.append
    monkeypatch.setattr(worker_of(client.transport.engine), "launch", always_fails)
    assert death_reason(client, reasons) == f"{MAX_FAILURES} steps in a row failed"


def test_failed_probe_step_ends_the_engine(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    client.on_end = reasons.append
    monkeypatch.setattr(worker_of(client.transport.engine), "run_step", always_fails)
    assert death_reason(client, reasons) == "a step failed, and so did an empty one after it"


def test_inconsistent_cache_ends_the_engine(engine: Engine) -> None:
    pool = engine.scheduler.cache.paged.pool
    lost = pool.free.pop()
    try:
        with pytest.raises(EngineDeadError):
            engine.recover()
    finally:
        pool.free.append(lost)
        engine._failures = 0


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
