"""Events of cached blocks of several replicas: each replica is a data-parallel rank."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.cache.block_log import BlocksCleared, BlocksStored
from tests.bundled_model import GREEDY
from tests.replicas.test_migration import running

EVENTS = {"enable_kv_cache_events": True}
PROMPTS = [[10 + number] * 200 for number in range(2)]


class Publisher:
    """Publisher that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_closed = False
        self.num_batches = 0
        self.num_dropped = 0

    def publish(self, events: Sequence[Any]) -> None:
        self.events += events
        self.num_batches += 1

    def close(self) -> None:
        self.is_closed = True

    @property
    def tokens(self) -> set[int]:
        """Tokens of the blocks since the last BlocksCleared."""
        result: set[int] = set()
        for event in self.events:
            if isinstance(event, BlocksCleared):
                result.clear()
            elif isinstance(event, BlocksStored):
                result.update(event.token_ids)
        return result


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_publishers", [2, 1])
def test_each_replica_has_a_publisher(num_publishers: int) -> None:
    """With one for two replicas, as while a replica is replaced, the second waits for it."""
    publishers = [Publisher() for _ in range(num_publishers)]

    async def work() -> None:
        async with running(publishers=publishers, kv_events_config=EVENTS) as replicas:
            members = dict(replicas.transport._members)
            await replicas.answers(PROMPTS, [GREEDY.clone() for _ in PROMPTS], None)
            routed = [name for _, name in replicas.fleet.routed]
            assert sorted(routed) == ["a", "b"]
            cached = {
                members[name].publisher: prompt
                for name, prompt in zip(routed, PROMPTS, strict=True)
            }
            for publisher in publishers:
                await until(lambda publisher=publisher: publisher.tokens)
                assert publisher.tokens == set(cached[publisher])  # type: ignore[index]
            (leaves,) = [n for n in members if members[n].publisher is publishers[0]]
            (stays,) = members.keys() - {leaves}
            replicas.fleet.kill(leaves)
            await until(lambda: not publishers[0].tokens)
            assert replicas.llm.stats().kv_event_batches_total == sum(
                publisher.num_batches for publisher in publishers
            )
            await replicas.answers([[30] * 200], [GREEDY.clone()], None)
            assert members[stays].publisher is publishers[-1] and 30 in publishers[-1].tokens

    asyncio.run(asyncio.wait_for(work(), 60))
    assert all(publisher.is_closed for publisher in publishers)
