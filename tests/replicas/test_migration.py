"""Answers of requests that move between replicas: everything that users get is as without."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.async_llm import AsyncLLM
from lockstep.errors import NumericsError
from lockstep.outputs import RequestOutput
from lockstep.replicas import host as host_module
from lockstep.replicas import transport as transport_module
from lockstep.replicas.messages import Call, OtherNumerics, Query
from lockstep.replicas.transport import ReplicaTransport
from lockstep.worker import executor
from lockstep.worker.ranks import start_ranks
from tests.bundled_model import PROMPTS, SEEDED, answer, make_engine
from tests.replicas.local_fleet import LocalFleet
from tests.thread_ranks import ThreadRanks

LENGTH = 24
AFTER = 4
"""Tokens of an answer after which its replica goes away."""
PARAMS: list[SamplingParams] = [
    replace(SEEDED, max_tokens=LENGTH, n=2, logprobs=2, prompt_logprobs=1),
    replace(SEEDED, max_tokens=LENGTH, stop=["zz", "):\n\n\n"], include_stop_str_in_output=True),
    replace(
        SEEDED,
        max_tokens=LENGTH,
        ignore_eos=False,
        structured_outputs={"regex": "([a-d][0-9]-){6}"},
    ),
    replace(SEEDED, max_tokens=LENGTH, presence_penalty=1.5, frequency_penalty=0.5, min_tokens=9),
]


@dataclass
class Replicas:
    """Replicas of the bundled model with one client."""

    llm: AsyncLLM
    fleet: LocalFleet
    transport: ReplicaTransport

    async def answers(
        self, prompts: list[Any], params: list[SamplingParams], act: Callable[[], None] | None
    ) -> list[RequestOutput]:
        """Return the answers; call act() once the first one has AFTER tokens."""
        acted = act is None

        async def read(prompt: Any, one: SamplingParams) -> RequestOutput:
            nonlocal acted
            async for output in self.llm.generate(prompt, one.clone()):
                if not acted and len(output.outputs[0].token_ids) >= AFTER:
                    acted = True
                    act()
            return output

        return await asyncio.gather(*map(read, prompts, params))

    async def until_ready(self) -> None:
        """Wait until all replicas have reported their numerics."""
        while not all(state.numerics for state in self.transport.router._replicas.values()):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    numerics: dict[str, str] | None = None,
    allow: bool = False,
    serves: str = "",
    publishers: Sequence[Any] = (),
    names: str = "ab",
    **settings: Any,
) -> AsyncIterator[Replicas]:
    llms = {name: make_engine(None, max_num_batched_tokens=64, **settings) for name in names}
    first = llms["a"]
    fleet = LocalFleet(llms, numerics)
    transport = ReplicaTransport(fleet, serves or first.engine.fingerprint, allow, publishers)
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.processor = first.processor
    llm._start(transport, first.engine.facts, None)
    replicas = Replicas(llm, fleet, transport)
    await replicas.until_ready()
    try:
        yield replicas
    finally:
        await asyncio.to_thread(llm.shutdown)


@pytest.fixture(scope="module")
def alone() -> LLM:
    return make_engine("mtp", max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("way", "names", "ranks"),
    [
        ("kill", "ab", 1),
        pytest.param("drain", "ab", 1, marks=pytest.mark.slow),
        pytest.param("kill", "ab", 2, marks=pytest.mark.slow),
        pytest.param("kill", "abcd", 1, marks=pytest.mark.slow),
    ],
)
def test_answers_do_not_change_where_a_replica_goes_away(
    alone: LLM, way: str, names: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions, log-probabilities of answers and prompts, stop strings, grammars, penalties."""
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks if ranks > 1 else start_ranks)
    params = [PARAMS[i % 4].clone() for i in range(8)]
    prompts = [PROMPTS[i // 2] for i in range(8)]
    expected = list(map(answer, alone.generate(prompts, [one.clone() for one in params])))

    async def work() -> tuple[list[RequestOutput], ReplicaTransport, LocalFleet]:
        async with running(names=names, tensor_parallel_size=ranks) as replicas:
            fleet = replicas.fleet
            leave = {"kill": lambda: fleet.kill("a"), "drain": lambda: fleet.list("b")}[way]
            outputs = await replicas.answers(prompts, params, leave)
            assert sorted(replicas.transport.router.replica_ids) == list(names[1:])
            stats = replicas.llm.stats()
            assert stats.resumed_total == sum(replicas.transport.moved_total.values())
            assert stats.num_running + stats.num_waiting == 0 or stats.generation_tokens_total
            assert not replicas.transport._open and not replicas.transport._request_of
            return outputs, replicas.transport, fleet

    outputs, transport, fleet = asyncio.run(work())
    assert list(map(answer, outputs)) == expected
    assert {name for _, name in fleet.routed} == set(names)
    reason = {"kill": "lost", "drain": "drained"}[way]
    # A busy machine may answer most of them first: the replica had 2 to 4 of the 8 requests.
    assert transport.moved_total[reason] >= 1, "requests were moved in the middle"


def test_reports_that_fail_lose_the_replica(alone: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown error moves the requests as the end of the replica does."""
    params = [PARAMS[i].clone() for i in range(2)]
    expected = list(map(answer, alone.generate(PROMPTS[:2], [one.clone() for one in params])))

    async def work() -> list[RequestOutput]:
        async with running() as replicas:
            handle = replicas.transport._handle
            replica_id = ""

            def fail() -> None:
                nonlocal replica_id
                (_, replica_id), *_ = replicas.fleet.routed
                replicas.transport._handle = fail_once  # type: ignore[method-assign]

            def fail_once(of: str, report: Any) -> None:
                if of == replica_id:
                    replicas.transport._handle = handle  # type: ignore[method-assign]
                    raise ZeroDivisionError
                handle(of, report)

            outputs = await replicas.answers(PROMPTS[:2], params, fail)
            assert replicas.transport.moved_total["lost"]
            return outputs

    assert list(map(answer, asyncio.run(work()))) == expected
    assert "the reports of replica" in caplog.text and "ZeroDivisionError" in caplog.text


def test_scores_do_not_change_where_a_replica_goes_away(alone: LLM) -> None:
    """It dies after its first window of scored tokens, of which the client has seen nothing."""
    scoring = replace(SEEDED, max_tokens=120, prompt_logprobs=1)
    outputs = alone.generate(PROMPTS[:2], [scoring.clone() for _ in range(2)])
    prompts = [one.prompt_token_ids + one.outputs[0].token_ids for one in outputs]
    params = [
        replace(scoring, max_tokens=6, scored_from=len(one.prompt_token_ids)) for one in outputs
    ]
    expected = list(map(answer, alone.generate(prompts, [one.clone() for one in params])))

    async def work() -> list[RequestOutput]:
        async with running() as replicas:
            deliver = replicas.transport._deliver

            def deliver_and_kill(member: Any, updates: Any) -> None:
                deliver(member, updates)
                replicas.transport._deliver = deliver  # type: ignore[method-assign]
                (tag, update), *_ = updates
                assert 0 < len(update.token_ids) < 120, "a part of the scored tokens"
                request_id = replicas.transport._request_of[tag]
                replicas.fleet.kill(dict(replicas.fleet.routed)[request_id])

            replicas.transport._deliver = deliver_and_kill  # type: ignore[method-assign]
            result = await replicas.answers(prompts, params, None)
            assert replicas.transport.moved_total["lost"]
            return result

    assert list(map(answer, asyncio.run(work()))) == expected


@pytest.mark.slow
def test_answers_wait_while_no_replica_is_left(alone: LLM) -> None:
    prompts, params = PROMPTS, PARAMS
    expected = list(map(answer, alone.generate(prompts, [one.clone() for one in params])))

    async def work() -> list[RequestOutput]:
        async with running() as replicas:
            fleet, loop = replicas.fleet, asyncio.get_running_loop()

            def leave() -> None:
                fleet.list()
                loop.call_later(0.8, check)
                loop.call_later(0.9, fleet.list, "b")

            def check() -> None:
                assert replicas.llm._client.restarting and not replicas.llm.is_running

            return await replicas.answers(prompts, params, leave)

    assert list(map(answer, asyncio.run(work()))) == expected


def test_a_request_ends_where_no_replica_has_its_numerics() -> None:
    async def work() -> tuple[str, str]:
        numerics = {"a": "ls-one", "b": "ls-two"}
        async with running(numerics, serves="ls-one") as replicas:
            long = replace(SEEDED, max_tokens=200)
            with pytest.raises(NumericsError) as begun:
                await replicas.answers([PROMPTS[0]], [long], lambda: replicas.fleet.kill("a"))
            with pytest.raises(NumericsError) as new:
                await replicas.answers([PROMPTS[0]], [long], None)
            assert {name for _, name in replicas.fleet.routed} == {"a"}
            assert not replicas.transport._open
            return str(begun.value), str(new.value)

    begun, new = asyncio.run(work())
    assert "tokens were computed with the numerics ls-one" in begun
    assert "all replicas that run have ls-two" in begun and "--allow-other-numerics" in begun
    assert "the server answers with the numerics ls-one" in new and "have ls-two" in new


def test_a_request_goes_on_with_other_numerics_if_allowed() -> None:
    """The replicas compute the same bits here, and only their fingerprints differ."""

    async def work() -> tuple[list[RequestOutput], set[str]]:
        numerics = {"a": "ls-one", "b": "ls-two"}
        async with running(numerics, allow=True) as replicas:
            fleet = replicas.fleet
            first = [replace(SEEDED, max_tokens=LENGTH), replace(SEEDED, max_tokens=LENGTH)]
            outputs = await replicas.answers(PROMPTS[:2], first, lambda: fleet.kill("a"))
            return outputs, {name for _, name in fleet.routed}

    outputs, names = asyncio.run(work())
    assert [len(output.outputs[0].token_ids) for output in outputs] == [LENGTH, LENGTH]
    assert names == {"a", "b"}
    assert all(output.metrics.forced_mismatch is None for output in outputs)


def test_aborted_requests_leave_the_replicas() -> None:
    async def work() -> None:
        async with running() as replicas:
            streams = [
                replicas.llm.generate(prompt, replace(SEEDED, max_tokens=100)) for prompt in PROMPTS
            ]
            for stream in streams:
                await anext(stream)
                await stream.aclose()
            hosts = replicas.fleet.hosts.values()
            while any(host._calls or host.transport.engine.has_work() for host in hosts):
                await asyncio.sleep(0.01)
            assert not replicas.transport._open
            await replicas.llm.reset_prefix_cache()
            await replicas.answers(PROMPTS, [replace(SEEDED, max_tokens=4)] * 4, None)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_abort_does_not_cancel_a_reset() -> None:
    """Requests wait for a reset of the prefix caches; one that is aborted leaves the others."""

    async def work() -> None:
        async with running() as replicas:
            may_reset = asyncio.Event()
            fleet_reset = replicas.fleet.reset_prefix_cache
            num_reset = 0

            async def reset(query: Query) -> None:
                nonlocal num_reset
                await asyncio.wait_for(may_reset.wait(), 10)
                await fleet_reset(query)
                num_reset += 1

            replicas.fleet.reset_prefix_cache = reset
            replicas.transport.reset_prefix_cache()
            short = replace(SEEDED, max_tokens=4)
            aborted = asyncio.create_task(replicas.answers(PROMPTS[:1], [short], None))
            kept = asyncio.create_task(replicas.answers(PROMPTS[1:2], [short], None))
            while len(replicas.transport._open) < 2:
                await asyncio.sleep(0.01)
            aborted.cancel()
            while len(replicas.transport._open) > 1:
                await asyncio.sleep(0.01)
            replicas.transport._loop.call_soon_threadsafe(may_reset.set)
            await asyncio.wait_for(kept, 10)
            assert num_reset == 2

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_call_that_fails_ends_its_request() -> None:
    async def work() -> None:
        async with running() as replicas:

            async def run(call: Call) -> AsyncIterator[OtherNumerics]:
                raise ValueError("this call cannot be sent")
                yield

            replicas.fleet.run = run
            with pytest.raises(ValueError, match="cannot be sent"):
                one = replace(SEEDED, max_tokens=4)
                await asyncio.wait_for(replicas.answers([PROMPTS[0]], [one], None), 10)
            assert not replicas.transport._open and not replicas.transport._request_of

    asyncio.run(asyncio.wait_for(work(), 60))


def test_audits_of_a_lost_replica_count_as_dropped() -> None:
    async def work() -> None:
        async with running() as replicas:
            transport = replicas.transport
            waiting = transport._members["a"].stats
            transport._members["a"].stats = replace(waiting, num_audits_pending=3)
            replicas.fleet.kill("a")
            while transport.router.replica_ids != ["b"]:
                await asyncio.sleep(0.01)
            stats = replicas.llm.stats()
            assert (stats.audits_dropped_total, stats.num_audits_pending) == (3, 0)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_replica_that_comes_back_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks; the engine goes on, and reports its totals since its start."""
    monkeypatch.setattr(transport_module, "RECONNECT_SECONDS", 0.01)
    monkeypatch.setattr(host_module, "HEARTBEAT_SECONDS", 0.05)

    async def work() -> None:
        async with running() as replicas:
            members = replicas.transport._members
            params = replace(SEEDED, max_tokens=LENGTH)
            await replicas.answers(PROMPTS[:2], [params.clone() for _ in range(2)], None)
            while replicas.llm.stats().generation_tokens_total < 2 * LENGTH:
                await asyncio.sleep(0.01)
            (_, name), *_ = replicas.fleet.routed
            before = members[name]
            host = replicas.fleet.hosts[name]
            host._loop.call_soon_threadsafe(host._drop_client, replicas.transport.client_id)
            while members.get(name, before) is before or not members[name].numerics:
                await asyncio.sleep(0.01)
                assert replicas.llm.stats().generation_tokens_total == 2 * LENGTH
            await asyncio.sleep(0.2)  # some heartbeats
            assert replicas.llm.stats().generation_tokens_total == 2 * LENGTH
            assert not replicas.transport._lost_stats

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_replica_that_is_listed_again_before_it_is_drained_serves_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two listeners of one replica would end each other again and again."""

    async def work() -> None:
        async with running() as replicas:
            fleet = replicas.fleet

            def relist() -> None:
                fleet.list("b")
                fleet.list("a", "b")

            params = [replace(SEEDED, max_tokens=LENGTH) for _ in range(4)]
            await replicas.answers(PROMPTS[:4], params, relist)
            await asyncio.sleep(2 * transport_module.DRAIN_SECONDS)
            await replicas.until_ready()
            assert sorted(replicas.transport._members) == ["a", "b"]
            before = len(fleet.routed)
            await replicas.answers(PROMPTS[:4], params, None)
            assert {name for _, name in fleet.routed[before:]} == {"a", "b"}
            assert not replicas.transport.moved_total

    asyncio.run(asyncio.wait_for(work(), 60))
    assert "is lost" not in caplog.text
