"""EngineLoop in the test's own thread: when what callers ask for takes effect."""

from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.engine.engine import Engine
from lockstep.engine.engine_loop import Delivery, EngineLoop, TokenUpdate
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from tests.bundled_model import make_engine
from tests.tiny_model import TWO_LAYERS, make_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny engine that runs two steps ahead."""
    folder = str(make_model(tmp_path_factory.mktemp("loop"), **TWO_LAYERS))
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    return make_engine(
        "ngram", model=folder, steps_in_flight=2, num_gpu_blocks=60, **settings
    ).engine


def ask(name: str, max_tokens: int) -> Request:
    """A greedy request of 100 tokens."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    return Request(name, [5 + i % 7 for i in range(100)], params)


def test_pages_are_free_within_two_steps_of_an_abort(engine: Engine) -> None:
    """Told of in the middle of a request; what came of it afterwards is told to nobody."""
    pool = engine.scheduler.cache.paged.pool
    got: list[TokenUpdate | Exception] = []
    aborted_at: list[int] = []

    def deliver(news: Sequence[Delivery]) -> None:
        for _, item in news:
            got.append(item)
        if len(got) == 5:
            assert pool.used > 0
            aborted_at.append(engine.scheduler.ticks)
            loop.abort("long")
            loop.stop()

    loop = EngineLoop(engine, deliver)
    loop.submit([ask("long", 1000)])
    assert loop.run() is None
    assert len(got) == 5 and pool.used == 0
    assert engine.scheduler.ticks - aborted_at[0] <= 2
    assert not engine.scheduler.entries
    while engine.has_work():
        assert not engine.step()


def test_what_a_step_ended_is_told_first(engine: Engine) -> None:
    """By itself: a client that waits for its answer's end waits for no other's piece."""
    told: list[list[tuple[str, str | None]]] = []

    def deliver(news: Sequence[Delivery]) -> None:
        told.append([(name, item.finish_reason) for name, item in news])
        if told[-1] == [("c", "length")]:
            loop.stop()

    loop = EngineLoop(engine, deliver)
    loop.submit([ask("a", 6), ask("b", 3), ask("c", 9)])
    assert loop.run() is None
    for name in "abc":
        end = told.index([(name, "length")])
        before = told[:end]
        assert all(name in dict(news) for news in before[:1])
        assert not any((name, "length") in news for news in before)
    ended = told.index([("b", "length")])
    assert [name for name, _ in told[ended + 1]] == ["a", "c"]


def test_why_an_engine_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    loop = EngineLoop(engine, fail)
    loop.submit([ask("a", 5)])
    assert loop.run() == "it failed outside of a step"
    engine.clear()
