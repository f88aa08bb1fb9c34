"""LLM from several threads: each caller gets its own answer, or one error."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM
from lockstep.errors import ComputeError, EngineDeadError, RequestError
from lockstep.outputs import RequestOutput
from lockstep.worker.executor import worker_of
from lockstep.worker.worker import Worker
from tests import bundled_model
from tests.bundled_model import PROMPTS, QUESTION, answer, assert_idle, make_engine
from tests.tiny_model import TWO_LAYERS, make_model

PATIENCE = 60
GREEDY = replace(bundled_model.GREEDY, max_tokens=8)
SEEDED = replace(bundled_model.SEEDED, max_tokens=8)
LONG = replace(GREEDY, max_tokens=300)
IDS = {"prompt_token_ids": [5, 6, 7, 8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny model's folder."""
    return str(make_model(tmp_path_factory.mktemp("threads"), **TWO_LAYERS))


@pytest.fixture(scope="module")
def engine(folder: str) -> LLM:
    """Return the tiny model with its own draft module."""
    return make_engine("mtp", model=folder, load_format="dummy")


@pytest.fixture
def tiny(folder: str) -> Iterator[LLM]:
    """Yield a tiny LLM of two rows; close it after the test."""
    more: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    with make_engine(None, model=folder, max_num_seqs=2, num_gpu_blocks=60, **more) as llm:
        yield llm


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Yield threads that call an LLM."""
    with ThreadPoolExecutor(8) as threads:
        yield threads


def results(futures: list[Future[Any]]) -> list[Any]:
    """Return the results of all; fail if one hangs."""
    return [future.result(PATIENCE) for future in futures]


def test_threads_get_their_own_answers(llm: LLM, pool: ThreadPoolExecutor) -> None:
    calls: list[Callable[[], list[RequestOutput]]] = [
        *(lambda p=p: llm.generate(p, GREEDY) for p in PROMPTS),  # type: ignore[misc]
        lambda: llm.generate(PROMPTS, SEEDED),
        lambda: llm.generate(PROMPTS[0], replace(SEEDED, n=2)),
        lambda: llm.generate(PROMPTS[0], replace(GREEDY, stop=" ", ignore_eos=False)),
        lambda: llm.chat(QUESTION, GREEDY),
        lambda: llm.chat([QUESTION, QUESTION[:1]], GREEDY),
    ]
    expected = [[answer(out) for out in call()] for call in calls]
    received = results([pool.submit(call) for call in calls])
    for index, outs in enumerate(received):
        assert all(out.finished for out in outs)
        assert [answer(out) for out in outs] == expected[index]
    assert_idle(llm)


def test_exception_of_one_caller_does_not_affect_others(llm: LLM, pool: ThreadPoolExecutor) -> None:
    expected = answer(llm.generate(PROMPTS[0], GREEDY)[0])
    begun = threading.Barrier(2)

    def fail(out: RequestOutput) -> None:
        begun.wait(PATIENCE)
        raise ZeroDivisionError

    def wait(out: RequestOutput) -> None:
        if not waited:
            waited.append(True)
            begun.wait(PATIENCE)

    waited: list[bool] = []
    failing = pool.submit(llm.generate, PROMPTS, LONG, on_progress=fail)
    sound = pool.submit(llm.generate, PROMPTS[0], GREEDY, on_progress=wait)
    assert answer(sound.result(PATIENCE)[0]) == expected
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE)
    with pytest.raises(RequestError, match="token id 4096"):
        llm.generate([PROMPTS[0], [4096]], GREEDY)
    assert_idle(llm)


def test_interrupt_aborts_only_requests_of_the_main_thread(
    llm: LLM, pool: ThreadPoolExecutor
) -> None:
    expected = answer(llm.generate(PROMPTS[0], GREEDY)[0])
    running = threading.Event()

    def interrupt() -> list[RequestOutput]:
        running.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)
        return llm.generate(PROMPTS[0], GREEDY)

    other = pool.submit(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, on_progress=lambda out: running.set())
    assert answer(other.result(PATIENCE)[0]) == expected
    assert answer(llm.generate(PROMPTS[0], GREEDY)[0]) == expected
    assert_idle(llm)


def test_requests_go_on_after_a_failed_step(
    tiny: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(tiny.generate(IDS, GREEDY)[0])
    expected_long = answer(tiny.generate(IDS, LONG)[0])
    launch = worker_of(tiny.engine).launch
    both_run, waits, failed = threading.Event(), threading.Event(), threading.Event()

    def fail_once(*arguments: Any) -> Any:
        if tiny.engine.scheduler.num_running == 2 and not failed.is_set():
            both_run.set()
            assert waits.wait(PATIENCE)
            failed.set()
            raise RuntimeError("device 0x7f lost")
        return launch(*arguments)

    monkeypatch.setattr(worker_of(tiny.engine), "launch", fail_once)
    running = [pool.submit(tiny.generate, IDS, LONG) for _ in range(2)]
    assert both_run.wait(PATIENCE)
    waiting = pool.submit(tiny.generate, IDS, GREEDY)
    waits.set()
    assert [answer(one[0]) for one in results(running)] == [expected_long] * 2
    assert answer(waiting.result(PATIENCE)[0]) == expected
    assert answer(tiny.generate(IDS, GREEDY)[0]) == expected


def test_dead_engine_fails_every_caller(
    tiny: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("device 0x7f lost")

    monkeypatch.setattr(worker_of(tiny.engine), "launch", fail)
    monkeypatch.setattr(Worker, "probe", fail)
    for future in [pool.submit(tiny.generate, IDS, LONG) for _ in range(5)]:
        with pytest.raises((ComputeError, EngineDeadError)):
            future.result(PATIENCE)
    with pytest.raises(EngineDeadError, match=r"Make a new LLM\."):
        tiny.generate(IDS, GREEDY)


def test_close_ends_calls_of_other_threads(tiny: LLM, pool: ThreadPoolExecutor) -> None:
    running = threading.Event()
    calls = [
        pool.submit(tiny.generate, IDS, LONG, on_progress=lambda out: running.set())
        for _ in range(5)
    ]
    assert running.wait(PATIENCE)
    tiny.close()
    for call in calls:
        with pytest.raises(EngineDeadError, match=r"was (shut down|closed).*Make a new"):
            call.result(PATIENCE)
    for use in (lambda: tiny.generate(IDS), lambda: tiny.engine):
        with pytest.raises(EngineDeadError, match="the LLM was closed. Make a new one"):
            use()
    tiny.close()


def test_unreferenced_llm_frees_its_engine(folder: str) -> None:
    llm = make_engine(None, model=folder, load_format="dummy", skip_tokenizer_init=True)
    llm.generate(IDS, GREEDY)
    engine = weakref.ref(llm.engine)
    names = {thread.name for thread in threading.enumerate()}
    assert "lockstep-engine" in names
    del llm
    gc.collect()
    assert engine() is None
