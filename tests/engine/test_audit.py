"""Audits: an idle engine runs ended requests again, and finds every answer that differs."""

import asyncio
import json
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lockstep import LLM
from lockstep.check.random_adapters import write_random_adapter
from lockstep.engine import auditor
from lockstep.engine.async_engine import AsyncEngine, Stream
from lockstep.engine.audit_record import MAX_RECORDS, UNFINISHED_SECONDS, records_in
from lockstep.engine.auditor import is_audited
from lockstep.engine.engine import MAX_FAILURES, Engine
from lockstep.engine.engine_loop import Delivery, EngineLoop
from lockstep.engine.process_transport import MAX_RESTARTS, ProcessTransport
from lockstep.engine.stats import Stats
from lockstep.errors import RequestError
from lockstep.layers.linear import Head
from lockstep.sampling_params import SamplingParams, StructuredOutputsParams
from lockstep.scheduling.request import Request
from lockstep.worker import executor
from lockstep.worker.executor import worker_of
from tests import engine_factories
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, TEXT, assert_idle, make_engine
from tests.thread_ranks import ThreadRanks
from tests.tiny_model import QWEN3, QWEN3_MOE, TWO_LAYERS, make_model

SCORED = replace(SEEDED, n=2, logprobs=3)
LONG_PROMPT = [5 + i % 90 for i in range(150)]
ENGINES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "mtp": ("mtp", {}),
    "ngram, fp8 cache": ("ngram", {"kv_cache_dtype": "fp8"}),
    "adaptive, host memory": (
        "mtp",
        {"adaptive": True, "num_gpu_blocks": 12, "kv_offloading_size": 1},
    ),
    "two steps in flight": ("suffix", {"steps_in_flight": 2}),
}


def counts(llm: LLM) -> Stats:
    """Return the statistics of an idle engine, none of whose audits wait."""
    assert_idle(llm)
    stats = llm.engine.drain_stats()
    assert stats.num_audits_pending == stats.num_running == 0
    return stats


@pytest.mark.default_cases("mtp")
@pytest.mark.parametrize("name", ENGINES)
def test_sound_engines_have_no_differences(name: str) -> None:
    drafter, settings = ENGINES[name]
    llm = make_engine(drafter, audit=1.0, **settings)
    prompts = [*PROMPTS, {"prompt_token_ids": LONG_PROMPT}]
    for params in (SCORED, replace(GREEDY, prompt_logprobs=2), replace(GREEDY, min_tokens=3)):
        llm.generate(prompts, params, use_tqdm=False)
    form = replace(GREEDY, ignore_eos=False, structured_outputs={"regex": "[a-z]{3,8}"})
    llm.generate(prompts, form, use_tqdm=False)
    forced = replace(GREEDY, forced_token_ids=[7, 8, 9], forced_mismatch="report")
    llm.generate(prompts, forced, use_tqdm=False)
    stats = counts(llm)
    assert stats.audited_requests_total == sum(stats.requests_success_total.values()) == 30
    assert (stats.audit_differences_total, stats.audits_dropped_total) == (0, 0)


@pytest.mark.parametrize("base", [QWEN3, QWEN3_MOE], ids=["attention only", "mixture"])
def test_other_architectures_have_no_differences(base: dict[str, object], tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model", base))
    llm = make_engine("ngram", audit=1.0, model=folder, load_format="dummy", num_gpu_blocks=60)
    prompts = [{"prompt_token_ids": LONG_PROMPT[:length]} for length in (150, 150, 70, 3)]
    llm.generate(prompts, replace(SCORED, detokenize=False), use_tqdm=False)
    stats = counts(llm)
    assert (stats.audited_requests_total, stats.audit_differences_total) == (8, 0)


def test_adapters_and_ranks_have_no_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    model = worker_of(make_engine(None).engine).model
    adapter = write_random_adapter(model, tmp_path / "adapter", seed=5)
    llm = make_engine("mtp", audit=1.0, tensor_parallel_size=2, lora_modules={"one": str(adapter)})
    llm.generate(PROMPTS, GREEDY, lora_request=["one", "", "one", ""], use_tqdm=False)
    stats = counts(llm)
    assert (stats.audited_requests_total, stats.audit_differences_total) == (4, 0)


def break_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotate the logits of the last row in every step that has several rows."""
    forward = Head.forward

    def faulty(self: Head, x: Tensor) -> Tensor:
        out = forward(self, x).clone()
        if out.shape[0] > 1:
            out[-1] = out[-1].roll(1)
        return out

    monkeypatch.setattr(Head, "forward", faulty)


def test_audit_finds_a_fault_and_writes_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that run together get wrong logits; the audit of each runs alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auditor, "gettempdir", lambda: str(tmp_path))
    break_batches(monkeypatch)
    llm = make_engine(None, audit=1.0)
    with caplog.at_level(logging.ERROR):
        llm.generate(PROMPTS, replace(GREEDY, logprobs=1), use_tqdm=False)
    stats = counts(llm)
    assert stats.audited_requests_total == 4
    lines = [r.getMessage() for r in caplog.records if "audit" in r.getMessage()]
    assert len(lines) == stats.audit_differences_total >= 1
    (path,) = tmp_path.iterdir()
    assert str(path) in lines[0] and not any(str(path) in line for line in lines[1:])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = json.loads(path.read_text())["audit"]
    assert record["served"]["tokens"] != record["repeated"]["tokens"]
    assert stats.num_audit_records == 1
    caplog.clear()
    for num_records in (1, 0):
        restarted = make_engine(None, audit=1.0)
        restarted.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        assert counts(restarted).num_audit_records == num_records
        assert str(path) in caplog.text
        path.unlink(missing_ok=True)


def test_records_are_whole_and_bounded_over_all_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Replicas and engines that are restarted again and again share the folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auditor, "gettempdir", lambda: str(tmp_path))
    for number in range(MAX_RECORDS - 1):
        (tmp_path / f"lockstep-audit-{number}.json").touch()
    break_batches(monkeypatch)
    rename = Path.rename
    unfinished: list[list[Path]] = []

    def watched(path: Path, target: Path) -> Path:
        unfinished.append([one for one in records_in(tmp_path) if not one.name[15].isdigit()])
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    for num_written in (1, 0):
        caplog.clear()
        llm = make_engine(None, audit=1.0)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert counts(llm).num_audit_records == len(list(tmp_path.iterdir())) == MAX_RECORDS
        assert ("--replay " + str(tmp_path) in caplog.text) == bool(num_written)
        assert (f"{MAX_RECORDS} files are there already" in caplog.text) == (not num_written)
    assert unfinished == [[]]


def test_unfinished_records_of_killed_processes_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They have a part of a client's prompt. Another process may be writing a new one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auditor, "gettempdir", lambda: str(tmp_path))
    paths = [tmp_path / f"lockstep-audit-{name}.unfinished" for name in ("old", "new")]
    for path, age in zip(paths, (2 * UNFINISHED_SECONDS, 1), strict=True):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    make_engine(None, audit=1.0).generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert [path.exists() for path in paths] == [False, True]
    assert not records_in(tmp_path)


def test_unwritable_folder_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If no folder can be written, the log says why, and requests go on."""
    break_batches(monkeypatch)
    monkeypatch.setattr(auditor, "gettempdir", lambda: str(tmp_path / "missing"))
    llm = make_engine(None, audit=1.0)
    llm.engine.auditor._folders[0] = tmp_path / "also missing"
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert "could not be written" in caplog.text and str(tmp_path / "missing") in caplog.text
    assert counts(llm).audit_differences_total >= 1


def test_audits_need_no_folder_of_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have a file system that is not writable."""

    def missing() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(auditor, "gettempdir", missing)
    break_batches(monkeypatch)
    llm = make_engine(None, audit=1.0)
    llm.engine.auditor._folders[0] = Path("/missing")
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert counts(llm).audit_differences_total >= 1


def test_wrong_logprobs_are_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens are equal; a log-probability has another last bit."""
    monkeypatch.chdir(tmp_path)
    llm = make_engine(None, audit=1.0)
    update = llm.engine.scheduler.update

    def faulty(schedule: Any, results: Any) -> list[Request]:
        for row in results.rows.values():
            if len(results.rows) > 1 and row.logprobs:
                entry = next(iter(row.logprobs[0].values()))
                entry.logprob = entry.logprob * (1 + 2**-23)
        return update(schedule, results)

    monkeypatch.setattr(llm.engine.scheduler, "update", faulty)
    llm.generate(PROMPTS[:2], replace(GREEDY, logprobs=0), use_tqdm=False)
    assert counts(llm).audit_differences_total == 2


def test_share_is_a_hash_of_the_id() -> None:
    ids = [f"request-{index}" for index in range(20_000)]
    chosen = [name for name in ids if is_audited(name, 0.1)]
    assert 1_800 < len(chosen) < 2_200
    assert chosen == [name for name in ids if is_audited(name, 0.1)]
    assert {name for name in ids if is_audited(name, 0.05)} < set(chosen)
    assert all(is_audited(name, 1.0) for name in ids)
    assert not any(is_audited(name, 0.0) for name in ids)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return a tiny engine that runs two steps ahead and audits all requests."""
    folder = str(make_model(tmp_path_factory.mktemp("audit"), **TWO_LAYERS))
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    return make_engine(
        "ngram", model=folder, steps_in_flight=2, num_gpu_blocks=60, audit=1.0, **settings
    ).engine


def make_request(name: str, max_tokens: int) -> Request:
    """Return a greedy request of 100 tokens."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, logprobs=1)
    return Request(name, [5 + i % 7 for i in range(100)], params)


class Client:
    """Client of a loop in the test's thread. on_step: called before each step."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine, self._deliver)
        self.ended: list[str] = []
        self.stats = engine.drain_stats()
        self._step = engine.step
        monkeypatch.setattr(engine, "step", self._counted_step)

    def on_step(self) -> None:
        """Stop once there is no request and no audit."""

    def _counted_step(self) -> list[Request]:
        self.on_step()
        return self._step()

    def _deliver(self, updates: Sequence[Delivery]) -> None:
        assert not any(name.startswith("audit-") for name, _ in updates)
        self.ended += [name for name, item in updates if getattr(item, "finish_reason", "x")]

    def run(self, *requests: Request) -> None:
        """Submit requests, and serve until they and their audits have ended."""
        self.loop.submit(requests)
        submitted = self.loop.notify_when_idle()
        notify = self.loop._notify_idle

        def notify_and_stop() -> None:
            notify()
            if submitted.is_set() and not self.engine.has_work():
                self.loop.stop()

        self.loop._notify_idle = notify_and_stop  # type: ignore[method-assign]
        assert self.loop.run() is None

    def change(self, name: str) -> int:
        """Return by how much a counter has grown since the client was made."""
        return int(getattr(self.engine.drain_stats(), name) - getattr(self.stats, name))


class Interrupting(Client):
    """Client that submits a request at the fourth step of the first audit."""

    audited_steps = 0
    rows: list[str] = []

    def on_step(self) -> None:
        """Submit the second request in the midst of an audit."""
        scheduler = self.engine.scheduler
        if scheduler.is_auditing:
            self.audited_steps += 1
            assert not self.engine._in_flight, "a request would wait for a second step"
        if self.audited_steps == 4:
            self.loop.submit([make_request("second", 5)])
            self.audited_steps += 1
        elif "second" in scheduler.entries:
            self.rows = [entry.request.id for entry in scheduler.running]
            assert not scheduler.is_auditing


def test_requests_stop_audits(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Interrupting(tiny, monkeypatch)
    client.run(make_request("first", 30))
    assert client.ended == ["first", "second"] and client.rows == ["second"]
    assert client.change("audited_requests_total") == 2
    assert client.change("audits_dropped_total") == 0
    assert client.change("audit_differences_total") == 0
    # Audits are in no statistic of requests and tokens.
    assert client.change("prompt_tokens_total") == 200
    assert client.change("generation_tokens_total") == 35
    assert tiny.drain_stats().requests_success_total.total() == 2


@pytest.mark.parametrize("submits", [False, True])
def test_grammar_that_is_compiled_stops_no_audit(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, submits: bool
) -> None:
    """An engine's process submits the requests without a grammar at once, here none."""

    class Submitting(Client):
        audited_steps = 0

        def on_step(self) -> None:
            if tiny.scheduler.is_auditing:
                self.audited_steps += 1
                if self.audited_steps == 3 and submits:
                    self.loop.submit([])

    client = Submitting(tiny, monkeypatch)
    client.run(make_request("a", 8))
    assert client.change("audited_requests_total") == 1
    assert client.audited_steps <= 9


def test_audits_use_no_cached_prefix(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.reset_prefix_cache()
    cached: list[tuple[bool, int]] = []
    schedule = tiny.scheduler.schedule

    def watched() -> Any:
        plan = schedule()
        cached.extend(
            (tiny.scheduler.entries[one.spec.id].request.is_audit, one.start)
            for one in plan.admissions
        )
        return plan

    monkeypatch.setattr(tiny.scheduler, "schedule", watched)
    pool = tiny.scheduler.cache.paged.pool
    Client(tiny, monkeypatch).run(make_request("a", 5))
    keys = set(pool.by_key)
    Client(tiny, monkeypatch).run(make_request("b", 5))
    assert cached == [(False, 0), (True, 0), (False, 64), (True, 0)]
    assert set(pool.by_key) == keys and keys


def test_aborted_requests_are_not_audited(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Aborting(Client):
        def on_step(self) -> None:
            if len(tiny.scheduler.running) == 1:
                self.loop.abort("a")

    client = Aborting(tiny, monkeypatch)
    client.run(make_request("a", 30))
    assert client.change("audited_requests_total") == 0 and not tiny.auditor.num_pending


def test_audit_of_a_failed_step_is_dropped(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Client):
        has_failed = False

        def on_step(self) -> None:
            if tiny.scheduler.is_auditing and not self.has_failed:
                self.has_failed = True
                raise RuntimeError("a step of an audit failed")

    client = Failing(tiny, monkeypatch)
    client.run(make_request("a", 5), make_request("b", 5))
    assert sorted(client.ended) == ["a", "b"]
    assert client.change("audits_dropped_total") == client.change("audited_requests_total") == 1
    assert client.change("resumed_total") == 0


def test_failed_audits_do_not_end_the_engine(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request succeeds between them."""

    class Failing(Client):
        def on_step(self) -> None:
            if any(one.request.is_audit for one in tiny.scheduler.entries.values()):
                raise RuntimeError("a step of an audit failed")

    client = Failing(tiny, monkeypatch)
    requests = [make_request(f"request {number}", 2) for number in range(MAX_FAILURES + 1)]
    client.run(*requests)
    assert len(client.ended) == len(requests)
    assert client.change("audits_dropped_total") == len(requests)


def test_refused_audit_is_dropped(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = tiny.add

    def refusing(request: Request) -> None:
        if request.id == "audit-a":
            raise RequestError("not allowed", "prompt")
        add(request)

    monkeypatch.setattr(tiny, "add", refusing)
    client = Client(tiny, monkeypatch)
    client.run(make_request("a", 2), make_request("b", 4))
    assert client.ended == ["a", "b"] and "refused audit-a" in caplog.text
    assert client.change("audits_dropped_total") == client.change("audited_requests_total") == 1


@pytest.mark.parametrize("limit", ["MAX_PENDING", "MAX_PENDING_BYTES"])
def test_oldest_audits_are_dropped(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Two of three audits fit: of the number, and of the bytes."""
    monkeypatch.setattr(auditor, limit, 2 if limit == "MAX_PENDING" else 22_000)
    audited: list[str] = []
    begin = tiny.auditor.begin

    def watched() -> Request | None:
        request = begin()
        audited.extend([request.id] if request is not None else [])
        return request

    monkeypatch.setattr(tiny.auditor, "begin", watched)
    client = Client(tiny, monkeypatch)
    client.run(*(make_request(name, tokens) for name, tokens in (("a", 4), ("b", 8), ("c", 12))))
    assert audited == ["audit-b", "audit-c"]
    assert client.change("audits_dropped_total") == 1


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": list(range(1000))},
        {"forced_token_ids": list(range(1000))},
        {"prediction": list(range(1000))},
        {"logit_bias": dict.fromkeys(range(1000), 1.0)},
        {"structured_outputs": StructuredOutputsParams(grammar="a" * 36_000)},
    ],
    ids=lambda params: next(iter(params)),
)
def test_large_parameters_count_as_bytes_of_an_audit(params: dict[str, Any]) -> None:
    small = make_request("small", 1000)
    small.params = small.params.clone(ignore_eos=False)
    large = replace(small, params=small.params.clone(**params))
    num_bytes = 1000 * (sys.getsizeof(1) + 8)  # an int and its entry
    assert auditor._Audit(large).size - auditor._Audit(small).size >= num_bytes


def test_deep_parameters_count_as_bytes_of_an_audit() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert auditor.size_of(deep) > 5000 * sys.getsizeof({"items": 0})


@pytest.mark.parametrize("first", [1, "a", None])
def test_lists_of_mixed_values_count_as_bytes_of_an_audit(first: object) -> None:
    """An `enum` of a client's JSON schema may be such a list."""
    assert auditor.size_of({"enum": [first, "a" * 100_000]}) > 100_000


def test_grammars_count_as_bytes_of_an_audit() -> None:
    """A recipe may be as long as a body, and each audit keeps its grammar's first mask."""
    llm = make_engine(None)
    words = [f"word{i}" for i in range(1000)]
    form = StructuredOutputsParams(choice=words)
    params = replace(GREEDY, ignore_eos=False, structured_outputs=form)
    (request,) = llm.processor.requests("form", TEXT, params)
    assert request.grammar is not None
    without = auditor._Audit(replace(request, grammar=None)).size
    first_mask = llm.engine.vocab_size // 8
    assert auditor._Audit(request).size - without >= len("".join(words)) + first_mask


def test_resumed_answers_are_generated_again() -> None:
    """A lost engine's tokens were forced; the audit generates them."""
    llm = make_engine("mtp", audit=1.0)
    (request,) = llm.processor.requests("whole", TEXT, replace(GREEDY, max_tokens=12))
    llm.engine.run([request], lambda request: None)
    (resumed,) = llm.processor.requests("resumed", TEXT, replace(GREEDY, max_tokens=12))
    resumed.params = resumed.params.clone(forced_token_ids=request.output_token_ids[:6])
    resumed.num_resumed = 6
    llm.engine.run([resumed], lambda request: None)
    assert resumed.token_sources.count("forced") == 6
    repeated = resumed.audit()
    llm.engine.run([repeated], lambda request: None)
    assert repeated.output_token_ids == request.output_token_ids == resumed.output_token_ids
    assert set(repeated.token_sources) == {"plain"}


async def end(stream: Stream) -> str | None:
    """Return the finish reason of a stream."""
    return [update.finish_reason async for update in stream][-1]


async def lose_engine_with_a_pending_audit(client: AsyncEngine) -> Stats:
    """Kill the engine while an audit waits for a long request; return the last statistics."""
    transport = client.transport
    assert isinstance(transport, ProcessTransport) and transport.pid is not None
    long = client.stream(make_request("long", 900))
    assert await end(client.stream(make_request("short", 2))) == "length"
    while not client.stats().num_audits_pending:
        await asyncio.sleep(0.01)
    os.kill(transport.pid, signal.SIGKILL)
    assert await end(long) == "length"
    while not client.stats().audited_requests_total:
        await asyncio.sleep(0.01)
    return client.stats()


@contextmanager
def audited_process(
    make: Callable[..., engine_factories.EngineAndGrammars], folder: Path
) -> Iterator[AsyncEngine]:
    """Yield a client of a tiny engine that audits all requests, in a separate process."""
    settings = {
        "model": str(make_model(folder, **TWO_LAYERS)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 2,
        "num_gpu_blocks": 60,
        "audit": 1.0,
    }
    client = AsyncEngine(ProcessTransport(partial(make, settings), 30.0))
    client.start()
    try:
        yield client
    finally:
        client.shutdown()


def test_process_audits_and_counts_lost_audits(tmp_path: Path, forked_processes: None) -> None:
    """The answer that went on in the next process is audited as a whole."""
    with audited_process(engine_factories.plain, tmp_path / "model") as client:
        stats = engine_factories.run(lose_engine_with_a_pending_audit(client))
    assert (stats.audits_dropped_total, stats.num_audits_pending) == (1, 0)
    assert (stats.audited_requests_total, stats.audit_differences_total) == (1, 0)
    assert (stats.restarts_total, stats.resumed_total) == (1, 1)


async def lose_engines_in_audits(client: AsyncEngine, count: int) -> None:
    """Send a request to each of `count` engines, and wait until its audit has ended the engine."""
    for number in range(count):
        assert await end(client.stream(make_request(f"request {number}", 2))) == "length"
        while client.is_alive and client.stats().restarts_total == number:
            await asyncio.sleep(0.01)


async def drop_an_audit(client: AsyncEngine) -> Stats:
    """Send a request, and return the statistics that say that its audit will not run."""
    dropped = client.stats().audits_dropped_total
    assert await end(client.stream(make_request("last", 2))) == "length"
    while client.stats().audits_dropped_total == dropped:
        await asyncio.sleep(0.01)
    return client.stats()


def test_audits_that_end_engines_stop(
    tmp_path: Path, forked_processes: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Else every audited request would end an engine, for ever."""
    with audited_process(engine_factories.dies_in_audits, tmp_path / "model") as client:
        engine_factories.run(lose_engines_in_audits(client, MAX_RESTARTS))
        stats = engine_factories.run(drop_an_audit(client))
        assert (stats.restarts_total, stats.num_audits_pending) == (MAX_RESTARTS, 0)
        assert client.is_alive and stats.audited_requests_total == 0
    assert f"audit-request {MAX_RESTARTS - 1}" in caplog.text


def test_interrupted_call_drops_its_audits() -> None:
    llm = make_engine(None, audit=1.0)

    def interrupt(output: Any) -> None:
        if output.finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, on_progress=interrupt, use_tqdm=False)
    stats = counts(llm)
    assert stats.audited_requests_total <= 1
    assert stats.audited_requests_total + stats.audits_dropped_total >= 1
