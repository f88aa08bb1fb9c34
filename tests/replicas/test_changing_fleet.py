"""Answers while replicas come and go at random, against the answers of one engine alone."""

import asyncio
import random
from dataclasses import replace

import pytest

from lockstep import LLM
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.replicas import transport as transport_module
from tests.bundled_model import PROMPTS, answer, make_engine
from tests.replicas.local_fleet import LocalFleet
from tests.replicas.test_migration import PARAMS, Replicas, running

NAMES = "abc"
REQUESTS = 12
ROUNDS = 2
PATIENCE = 300


@pytest.fixture(scope="module")
def alone() -> LLM:
    return make_engine("mtp", max_num_batched_tokens=64)


async def change(replicas: Replicas, rng: random.Random) -> None:
    """Break connections, change the list of replicas and drop prefixes, until cancelled."""
    fleet = replicas.fleet
    while True:
        await asyncio.sleep(rng.uniform(0.02, 0.4))
        action = rng.choice(("disconnect", "remove", "list", "blink", "reset"))
        if action == "disconnect":
            fleet.disconnect(rng.choice(NAMES))
        elif action == "reset":
            await replicas.llm.reset_prefix_cache()
        else:
            if action != "list":
                fleet.list(*rng.sample(NAMES, rng.choice((0, 1, 2))))
            if action != "remove":
                fleet.list(*NAMES)


async def until_quiet(replicas: Replicas) -> None:
    """Wait until all replicas are present and have no call."""
    transport = replicas.transport
    while True:
        present = sorted(name for name, one in transport._members.items() if one.numerics)
        calls = [host._calls for host in replicas.fleet.hosts.values()]
        if present == list(NAMES) and not any([*calls, transport._open, transport._request_of]):
            return
        await asyncio.sleep(0.05)


def engines_of(fleet: LocalFleet) -> list[ThreadTransport]:
    """Return the transports of the replicas' engines."""
    transports = [host.transport for host in fleet.hosts.values()]
    assert all(isinstance(transport, ThreadTransport) for transport in transports)
    return transports  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_answers_while_replicas_come_and_go(
    alone: LLM, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(transport_module, "RECONNECT_SECONDS", 0.1)
    rng = random.Random(seed)
    prompts = [PROMPTS[i // 2 % len(PROMPTS)] for i in range(REQUESTS)]
    params = [replace(PARAMS[i % len(PARAMS)], seed=i) for i in range(REQUESTS)]
    expected = list(map(answer, alone.generate(prompts, [one.clone() for one in params])))

    async def read(replicas: Replicas, index: int) -> None:
        outputs = replicas.llm.generate(prompts[index], params[index].clone())
        if rng.random() < 0.2:
            await anext(outputs)
            await outputs.aclose()  # type: ignore[attr-defined]
            return
        received = [output async for output in outputs]
        assert answer(received[-1]) == expected[index]

    async def work() -> None:
        async with running(names=NAMES) as replicas:
            changing = asyncio.create_task(change(replicas, rng))
            for _ in range(ROUNDS):
                await asyncio.gather(*(read(replicas, index) for index in range(REQUESTS)))
            changing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await changing
            replicas.fleet.list(*NAMES)
            await until_quiet(replicas)
            for transport in engines_of(replicas.fleet):
                await asyncio.to_thread(transport.wait_until_idle)
                assert not transport.engine.has_work()
                transport.engine.scheduler.cache.check()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
