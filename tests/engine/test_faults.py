"""A step that fails ends what it worked on; an engine that cannot go on ends, and says so."""

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
    """A tiny model's folder."""
    return str(make_model(tmp_path_factory.mktemp("faults"), **TWO_LAYERS))


def make(folder: str, **settings: Any) -> Engine:
    """A tiny engine of two rows that runs two steps ahead and drafts by n-grams."""
    chosen = {"max_num_seqs": 2, "num_gpu_blocks": 60, "steps_in_flight": 2, **settings}
    more = {"load_format": "dummy", "skip_tokenizer_init": True}
    return make_engine("ngram", model=folder, **more, **chosen).engine


@pytest.fixture(scope="module")
def engine(folder: str) -> Engine:
    """An engine that the tests make fail, one after the other."""
    return make(folder)


@pytest.fixture
def client(engine: Engine) -> Iterator[AsyncEngine]:
    """A started client over it; afterwards the engine holds nothing."""
    found = AsyncEngine(ThreadTransport(engine))
    found.start()
    yield found
    found.shutdown()
    engine.clear()
    assert not engine.scheduler.cache.seqs and not worker_of(engine).saved
    assert len(engine.scheduler.free_rows) == 2
    engine.scheduler.cache.check()
    engine._failures = 0


def ask(name: str, max_tokens: int = 12) -> Request:
    """A greedy request of 100 tokens, which depend on the name's first letter only."""
    ids = [ord(name[0]) % 90 + i % 7 for i in range(100)]
    return Request(name, ids, SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens))


async def read(client: AsyncEngine, request: Request) -> list[TokenUpdate]:
    """All updates of a request."""
    return [update async for update in client.stream(request)]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def answer(client: AsyncEngine, name: str) -> list[int]:
    """The tokens of one request that is alone."""
    return [token for update in run(read(client, ask(name))) for token in update.token_ids]


def fails_once(inner: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    """`inner`, but for the first time that `when` holds."""
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
def test_a_failed_step_ends_what_it_worked_on_and_nothing_else(
    client: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: str,
    name: str,
) -> None:
    engine = client.transport.engine
    expected = answer(client, "c")
    before = engine.stats.requests_success_total["error"]
    running = [ask("a", 300), ask("b", 300)]

    def both_run() -> bool:
        return all(r.output_token_ids for r in running)

    patched = worker_of(engine) if owner == "worker" else engine.scheduler
    monkeypatch.setattr(patched, name, fails_once(getattr(patched, name), both_run))

    async def work() -> tuple[list[list[TokenUpdate]], list[TokenUpdate]]:
        ending = [asyncio.create_task(read(client, r)) for r in running]
        while not engine.scheduler.num_running == 2:
            await asyncio.sleep(0.001)
        waiting = await read(client, ask("c"))
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


def test_a_preempted_request_ends_too(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pages hold two prompts of two pages, but not both answers."""
    engine = make(folder, num_gpu_blocks=6)
    requests = [ask("a", 60), ask("b", 60)]
    for request in requests:
        engine.add(request)
    while not worker_of(engine).saved:
        assert engine.has_work()
        engine.step()
    monkeypatch.setattr(
        worker_of(engine),
        "launch",
        fails_once(worker_of(engine).launch, lambda: True),
    )
    with pytest.raises(RuntimeError):
        while engine.has_work():
            engine.step()
    assert {r.id for r in engine.recover()} == {"a", "b"}
    assert all(r.finish_reason == "error" for r in requests)
    engine.step()  # tells the worker to drop the saved rows
    assert not engine.has_work() and not worker_of(engine).saved
    engine.scheduler.cache.check()


def dead(client: AsyncEngine, told: list[str]) -> str:
    """What streams and callers hear of an engine that has ended, which on_end was told once."""
    heard = []

    async def work() -> None:
        results = await asyncio.gather(
            *(read(client, ask(n)) for n in "abcdefghijkl"), return_exceptions=True
        )
        heard.extend(r for r in results if isinstance(r, BaseException))
        with pytest.raises(EngineDeadError, match="Restart the server"):
            client.stream(ask("late"))

    run(work())
    client.transport._thread.join(PATIENCE)
    assert (
        not client.is_alive and not client.transport._thread.is_alive() and client.stalled_for == 0
    )
    assert heard and all(isinstance(error, EngineDeadError) for error in heard)
    assert len(told) == 1 and SECRET not in str(heard[0])
    assert str(heard[0]) == f"the engine has stopped: {told[0]}. Restart the server."
    return told[0]


def test_steps_that_fail_again_and_again_end_the_engine(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    client.on_end = told.append
    monkeypatch.setattr(worker_of(client.transport.engine), "launch", always_fails)
    assert dead(client, told) == f"{MAX_FAILURES} steps in a row failed"


def test_an_engine_that_runs_not_even_an_empty_step_ends(
    client: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    client.on_end = told.append
    monkeypatch.setattr(worker_of(client.transport.engine), "run_step", always_fails)
    assert dead(client, told) == "a step failed, and so did an empty one after it"


def test_a_cache_whose_books_do_not_balance_is_not_used_again(engine: Engine) -> None:
    pool = engine.scheduler.cache.paged.pool
    lost = pool.free.pop()
    try:
        with pytest.raises(EngineDeadError):
            engine.recover()
    finally:
        pool.free.append(lost)
        engine._failures = 0


def always_fails(*_: Any) -> Any:
    """A step on a device that is gone."""
    raise RuntimeError(SECRET)


def test_a_shutdown_is_no_end_to_be_told(client: AsyncEngine) -> None:
    told: list[str] = []
    client.on_end = told.append
    client.shutdown()
    assert not client.is_alive and not told


def test_a_step_that_hangs_is_seen_without_waiting_for_it(
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
        reading = asyncio.create_task(read(client, ask("a")))
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
