"""EngineLoop in the test's own thread: when commands take effect, and the order of deliveries."""

from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.engine.engine import Engine
from lockstep.engine.engine_loop import Delivery, EngineLoop, TokenUpdate
from lockstep.errors import RankError
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from tests.bundled_model import make_engine
from tests.tiny_model import TWO_LAYERS, make_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return a tiny engine that runs two steps ahead."""
    folder = str(make_model(tmp_path_factory.mktemp("loop"), **TWO_LAYERS))
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    return make_engine(
        "ngram", model=folder, steps_in_flight=2, num_gpu_blocks=60, **settings
    ).engine


def make_request(name: str, max_tokens: int) -> Request:
    """Return a greedy request of 100 tokens."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    return Request(name, [5 + i % 7 for i in range(100)], params)


def test_abort_frees_pages_within_two_steps(engine: Engine) -> None:
    """The abort arrives during a request, and its later results are not delivered."""
    pool = engine.scheduler.cache.paged.pool
    got: list[TokenUpdate | Exception] = []
    aborted_at: list[int] = []

    def deliver(batch: Sequence[Delivery]) -> None:
        for _, item in batch:
            got.append(item)
        if len(got) == 5:
            assert pool.used > 0
            aborted_at.append(engine.scheduler.ticks)
            loop.abort("long")
            loop.stop()

    loop = EngineLoop(engine, deliver)
    loop.submit([make_request("long", 1000)])
    assert loop.run() is None
    assert len(got) == 5 and pool.used == 0
    assert engine.scheduler.ticks - aborted_at[0] <= 2
    assert not engine.scheduler.entries
    while engine.has_work():
        assert not engine.step()


def test_finished_requests_are_delivered_first(engine: Engine) -> None:
    """In a batch of their own: a client that waits for an end does not wait for other requests'
    deltas."""
    deliveries: list[list[tuple[str, str | None]]] = []

    def deliver(batch: Sequence[Delivery]) -> None:
        deliveries.append([(name, item.finish_reason) for name, item in batch])
        if deliveries[-1] == [("c", "length")]:
            loop.stop()

    loop = EngineLoop(engine, deliver)
    loop.submit([make_request("a", 6), make_request("b", 3), make_request("c", 9)])
    assert loop.run() is None
    for name in "abc":
        end = deliveries.index([(name, "length")])
        before = deliveries[:end]
        assert all(name in dict(batch) for batch in before[:1])
        assert not any((name, "length") in batch for batch in before)
    ended = deliveries.index([("b", "length")])
    assert [name for name, _ in deliveries[ended + 1]] == ["a", "c"]


def test_loop_returns_reason_of_failure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    loop = EngineLoop(engine, fail)
    loop.submit([make_request("a", 5)])
    assert loop.run() == "it failed outside of a step"
    engine.clear()


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(RankError("rank 1 of 2 ended by SIGKILL"), False), (RuntimeError("of this rank"), True)],
    ids=["another rank", "this rank"],
)
def test_log_of_a_failed_step_has_the_traceback_of_its_own_rank(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    has_traceback: bool,
) -> None:
    """A lost rank is named; the layers in which this rank waited for it are not shown."""

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(engine.executor, "execute", fail)
    monkeypatch.setattr(engine.executor, "probe", fail)
    loop = EngineLoop(engine, lambda batch: None)
    loop.submit([make_request("a", 5)])
    reason = loop.run()
    assert reason is not None and reason.startswith("a step failed, and so did an empty one")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and messages[1] == f"the engine cannot go on: {reason}"
    assert messages[0].startswith("a step failed; its requests go on from their tokens: a")
    assert [bool(record.exc_info) for record in caplog.records] == [has_traceback] * 2
    assert has_traceback or all("rank 1 of 2" in message for message in messages)
    engine.clear()
