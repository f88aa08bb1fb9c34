"""Ranks as processes: answers, and what happens when a rank fails, is killed or stops."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.cli.show import summary
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    LockstepError,
    RankError,
)
from lockstep.kernels.exchange import RankGroup
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.schedule import Schedule
from lockstep.spec.drafter import DraftContext
from lockstep.spec.ngram import create
from lockstep.worker import executor, local_ranks, ranks
from lockstep.worker.executor import executor_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.program import Drafter
from lockstep.worker.rank_pool import RankPool, RankProcess
from lockstep.worker.rank_process import Failed, make_group
from lockstep.worker.worker import LaunchedStep, Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, make_engine
from tests.thread_ranks import ThreadRanks

pytestmark = pytest.mark.usefixtures("forked_processes")
LONG = replace(GREEDY, max_tokens=400)
SHARED_MEMORY = Path("/dev/shm")


def processes(llm: LLM) -> list[multiprocessing.process.BaseProcess]:
    """Return the processes of the other ranks."""
    peers = executor_of(llm.engine).peers
    assert isinstance(peers, ranks.PeerRanks)
    return [rank.process for rank in peers._running.hosts[0].processes]


def wait_until_ended(llm: LLM) -> None:
    for process in processes(llm):
        process.join(20)
        assert not process.is_alive()


def wait_until_dead(llm: LLM, seconds: float = 10.0) -> None:
    """Wait until an idle LLM has noticed that its engine cannot go on."""
    assert llm._client is not None, "it has answered requests"
    end = time.monotonic() + seconds
    while llm._client.is_alive:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def memory_files() -> Iterator[None]:
    """Assert that no shared memory is left; that of engines in other processes goes in time."""
    if not SHARED_MEMORY.is_dir():
        yield
        return
    before = set(SHARED_MEMORY.glob("psm_*"))
    yield
    remaining = set(SHARED_MEMORY.glob("psm_*")) - before
    deadline = time.monotonic() + 60
    while any(path.exists() for path in remaining):
        assert time.monotonic() < deadline, remaining
        time.sleep(0.05)


def start_child(worker: Worker) -> None:
    """Start a process in that of another rank, as for compilers of kernels."""
    if worker.group.index:
        child = multiprocessing.get_context("fork").Process(target=abs, args=(1,), daemon=True)
        child.start()
        child.join(20)
        assert child.exitcode == 0


@pytest.mark.parametrize("max_tokens", [24, pytest.param(100, marks=pytest.mark.slow)])
def test_processes_give_the_answers_of_one_rank_until_one_is_killed(
    max_tokens: int, memory_files: None
) -> None:
    """The engine is idle when it loses the rank, and notices all the same."""
    params = [replace(GREEDY, logprobs=1), SEEDED, replace(SEEDED, seed=9, prompt_logprobs=1)]
    params.append(replace(GREEDY, max_tokens=max_tokens))
    expected = [answer(out) for out in make_engine("mtp").generate(PROMPTS, params)]
    llm = make_engine("mtp", tensor_parallel_size=2)
    assert " on cpu, 2 ranks, mtp K=" in summary(llm.engine.facts)
    executor_of(llm.engine).collective_rpc(start_child)
    assert [answer(out) for out in llm.generate(PROMPTS, params)] == expected
    (process,) = processes(llm)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until_dead(llm)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 .* ended by SIGKILL"):
        llm.generate(PROMPTS, LONG)
    with pytest.raises(LockstepError, match="rank 1 of 2"):
        llm.generate(PROMPTS, GREEDY)
    wait_until_ended(llm)


def test_a_rank_that_stops_is_given_up(memory_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENT_SECONDS", 3.0)
    llm = make_engine(None, tensor_parallel_size=2)
    (process,) = processes(llm)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(LockstepError, match=r"rank 1 of 2 .* has not answered for"):
        llm.generate(PROMPTS, LONG)
    wait_until_ended(llm)


def test_a_process_joins_the_next_engine_of_its_pool(memory_files: None) -> None:
    """The next engine has other settings; a process that has ended is replaced."""
    pool = RankPool()
    hooks = CheckHooks(rank_pool=pool)
    expected = [answer(out) for out in make_engine(None).generate(PROMPTS[:2], SEEDED)]
    pids = []
    for drafter in ("ngram", None, None):
        llm = make_engine(drafter, hooks, tensor_parallel_size=2)
        (process,) = processes(llm)
        assert process.pid is not None
        pids.append(process.pid)
        assert [answer(out) for out in llm.generate(PROMPTS[:2], SEEDED)] == expected
        executor_of(llm.engine).close()
        assert process.is_alive()
        if len(pids) == 2:
            os.kill(process.pid, signal.SIGKILL)
            process.join(20)
    assert pids[0] == pids[1] != pids[2]
    pool.close()
    assert not process.is_alive()


def test_a_process_that_does_not_leave_its_engine_is_not_kept(
    memory_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(local_ranks, "END_SECONDS", 0.2)
    pool = RankPool()
    llm = make_engine(None, CheckHooks(rank_pool=pool), tensor_parallel_size=2)
    (process,) = processes(llm)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    executor_of(llm.engine).close()
    assert not process.is_alive() and pool.take(1) is None


def test_ranks_do_not_wait_for_an_engine_that_a_closed_pool_will_not_have(
    memory_files: None,
) -> None:
    pool = RankPool()
    llm = make_engine(None, CheckHooks(rank_pool=pool), tensor_parallel_size=2)
    (process,) = processes(llm)
    pool.close()
    executor_of(llm.engine).close()
    assert process.exitcode == 0, "it has ended by itself"


ENGINES = {
    "LLM": "llm = LLM(**settings); llm.generate('a')",
    "AsyncLLM": "llm = AsyncLLM(**settings)",
}
EXIT = """
import sys
import weakref

class Owner: pass

owner = Owner()
weakref.finalize(owner, print, "finalized")
assert "multiprocessing.util" not in sys.modules
from lockstep import LLM, AsyncLLM
settings = dict(max_model_len=64, max_num_seqs=1, tensor_parallel_size=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_a_program_ends_that_does_not_close_its_engine(name: str, memory_files: None) -> None:
    """multiprocessing would wait for the ranks before it calls the functions of weakref."""
    program = EXIT + ENGINES[name]
    ended = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True)
    assert (ended.returncode, ended.stdout) == (0, b"finalized\n"), ended.stderr.decode()


def exhaust_memory(worker: Worker) -> None:
    """Let the next prompt step of another rank raise what a full GPU raises."""
    if not worker.group.index:
        return
    execute = worker.launch

    def launch(schedule: Schedule, fill_masks: FillMasks) -> list[LaunchedStep]:
        if len(schedule.decode) == len(PROMPTS):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return execute(schedule, fill_masks)

    worker.launch = launch  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_under_load_is_named(memory_files: None) -> None:
    llm = make_engine(None, tensor_parallel_size=2)
    executor_of(llm.engine).collective_rpc(exhaust_memory)
    began = time.monotonic()
    with pytest.raises(LockstepError, match=r"rank 1 of 2 .*CUDA out of memory\. Tried") as caught:
        llm.generate(PROMPTS, LONG)
    assert time.monotonic() - began < 20
    assert "worker.launch" in str(caught.value), "the traceback helps to find the step"
    wait_until_ended(llm)


def fail_on_other_ranks(context: DraftContext) -> Drafter:
    """Raise in the process of another rank, as memory that is short there would."""
    if multiprocessing.current_process().name.startswith("lockstep-rank"):
        raise RuntimeError("out of memory on this rank")
    return create(context)


class FailingDrafter:
    """Drafter whose first step raises, as the warm-up of a rank would."""

    def propose(self, *arguments: object) -> None:
        raise RuntimeError("out of memory on this rank")


def fail_in_the_warm_up(context: DraftContext) -> Drafter:
    """Return a drafter that raises in the process of another rank."""
    if multiprocessing.current_process().name.startswith("lockstep-rank"):
        return FailingDrafter()
    return create(context)


@pytest.mark.default_cases("fail_on_other_ranks")
@pytest.mark.parametrize("drafter", [fail_on_other_ranks, fail_in_the_warm_up])
def test_a_rank_that_cannot_start_is_named(
    drafter: Callable[[DraftContext], Drafter], memory_files: None
) -> None:
    config = EngineConfig.read(
        max_model_len=256,
        tensor_parallel_size=2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    )
    with pytest.raises(RankError, match="rank 1 of 2 .*out of memory on this rank"):
        build_engine(config, hooks=CheckHooks(drafter=drafter))
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("lockstep-rank")]


def test_sizes_that_do_not_divide_the_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .* allowed: 1, 2, 3, 6"):
        make_engine(None, tensor_parallel_size=4)


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, CapacityError, RankError])
def test_the_refusal_of_a_rank_is_the_error_of_one_rank(kind: type[LockstepError]) -> None:
    """Every rank refuses a setting. Whichever does so first, the caller gets the same error."""
    watch = ranks.RankWatch(4, [])
    watch._take(2, Failed("size=4 is not allowed", "", kind.__name__))
    with pytest.raises(kind, match=r"rank 2 of 4 .* failed: size=4 is not allowed"):
        watch.check()
    error = RuntimeError("the exchange was closed")
    peers: Any = SimpleNamespace(_running=watch)
    assert type(ranks.PeerRanks.cause(peers, error)) is kind
    serving = ranks.RankWatch(4, [], serving=True)
    serving._take(2, Failed("a step failed", "", kind.__name__))
    with pytest.raises(RankError):
        serving.check()


@pytest.mark.slow
def test_refused_sizes_leave_no_process(
    memory_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the other ranks refuse the size while the first one still joins them."""

    def join_late(*arguments: Any) -> RankGroup:
        group = make_group(*arguments)
        time.sleep(2.0)
        return group

    monkeypatch.setattr(ranks, "make_group", join_late)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .* allowed: 1, 2, 3, 6"):
        make_engine(None, tensor_parallel_size=4)
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("lockstep-rank")]


def test_the_end_of_an_engine_ends_its_ranks(memory_files: None) -> None:
    llm = make_engine(None, tensor_parallel_size=2)
    children = processes(llm)
    executor_of(llm.engine).peers.close()
    assert [process.exitcode for process in children] == [0]


def test_two_threads_that_wait_for_a_rank_get_its_exit_code() -> None:
    """The thread that reads reports sees the end of a rank for which close() waits, too."""
    context = multiprocessing.get_context("forkserver")
    for _ in range(20):
        reports, theirs = context.Pipe(duplex=False)
        reads, pipe = context.Pipe(duplex=False)
        process = context.Process(target=time.sleep, args=(0.05,))
        process.start()
        theirs.close()
        local = local_ranks.LocalRanks(range(1, 2))
        local.processes = [RankProcess(1, process, reports, pipe)]
        reader = threading.Thread(target=local.read, args=(reports,))
        reader.start()
        local.wait()
        reader.join()
        local.close()
        reads.close()
        assert process.exitcode == 0
