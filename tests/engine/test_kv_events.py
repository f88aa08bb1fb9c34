"""KV events of an engine in a process: a subscriber predicts every request's cached tokens."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM
from lockstep.cache.events_config import read_kv_events
from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.engine import Engine
from lockstep.engine.kv_publisher import BlockFormat, KVEventPublisher, open_publisher
from lockstep.engine.process_transport import ProcessTransport
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.engine_builder import build_engine
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from tests import engine_factories
from tests.engine.test_kv_publisher import Subscriber
from tests.kv_index import PrefixIndex
from tests.tiny_model import TWO_LAYERS, make_model
from tests.waiting import wait_until

PAGE = 64


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of a tiny hybrid with fewer pages than the prompts of a test have."""
    folder = tmp_path_factory.mktemp("events")
    return {
        "model": str(make_model(folder, **TWO_LAYERS)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 600,
        "max_num_seqs": 2,
        "num_gpu_blocks": 20,
        "num_snapshots": 9,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        },
    }


class Gateway:
    """Client of an engine, with an index of its events."""

    def __init__(
        self, client: AsyncEngine, publisher: KVEventPublisher, config: EngineConfig
    ) -> None:
        self.client = client
        self.publisher = publisher
        events = config.kv_events_config
        assert events is not None and events.replay_endpoint is not None
        self.subscriber = Subscriber(events.endpoint, events.replay_endpoint)
        self.index = PrefixIndex()
        self.count = 0

    def catch_up(self) -> None:
        """Apply all batches; those of a request are queued before its answer is delivered."""
        while self.index.num_batches < self.publisher.num_batches:
            for frames in self.subscriber.replay(self.index.num_batches):
                self.index.apply(frames[2])

    def ask(self, tokens: list[int], salt: str = "") -> tuple[int, int]:
        """Return the cached tokens of a prompt, as predicted and as the engine counted them."""
        self.catch_up()
        predicted = self.index.match(tokens, salt)
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        request = Request(f"r{self.count}", tokens, params, cache_salt=salt)

        async def read() -> int:
            updates = [update async for update in self.client.stream(request)]
            return int(updates[-1].metrics.num_cached_tokens)

        return predicted, asyncio.run(read())


@pytest.fixture
def gateway(settings: dict[str, Any], forked_processes: None) -> Iterator[Gateway]:
    config = EngineConfig.read(**settings)
    publisher = open_publisher(config.kv_events_config)
    assert publisher is not None
    transport = ProcessTransport(partial(engine_factories.plain, settings), 60.0)
    publisher.start(BlockFormat.of(transport.facts.plan))
    client = AsyncEngine(transport, publisher=publisher)
    client.start()
    result = Gateway(client, publisher, config)
    yield result
    result.subscriber.close()
    client.shutdown()


def test_a_subscriber_predicts_cached_tokens(gateway: Gateway) -> None:
    """Prompts share stems, and are evicted. The engine is killed in between."""
    rng = random.Random(3)
    stems = [[rng.randrange(90) for _ in range(420)] for _ in range(3)]
    hits = []
    for number in range(30):
        if number == 20:
            transport = gateway.client.transport
            assert isinstance(transport, ProcessTransport) and transport.pid is not None
            os.kill(transport.pid, signal.SIGKILL)
        tokens = rng.choice(stems)[: rng.randrange(1, 421)] + [rng.randrange(90)] * 3
        predicted, cached = gateway.ask(tokens, rng.choice(["", "", "of another"]))
        if number == 20:
            assert cached == 0, "the new engine has nothing"
            continue
        assert cached == predicted, number
        hits.append(cached)
    assert sum(hit > 0 for hit in hits) > 5
    gateway.catch_up()
    stats = gateway.client.stats()
    assert stats.kv_event_batches_total == gateway.index.num_batches > 20
    assert stats.kv_event_batches_dropped_total == 0


def test_a_reset_clears_the_index(gateway: Gateway) -> None:
    tokens = list(range(80)) * 2
    assert gateway.ask(tokens) == (0, 0)
    assert gateway.ask(tokens) == (2 * PAGE, 2 * PAGE)
    published = gateway.publisher.num_batches
    gateway.client.reset_prefix_cache()
    wait_until(lambda: gateway.publisher.num_batches > published)
    assert gateway.ask(tokens) == (0, 0), "an idle engine publishes a reset"


def test_python_publishes_and_closes(settings: dict[str, Any], tmp_path: Path) -> None:
    paths = {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    events = {**settings["kv_events_config"], **paths}
    tokens = list(range(80)) * 2
    subscriber = Subscriber(*paths.values())
    index = PrefixIndex()
    with LLM(**{**settings, "kv_events_config": events}) as llm:
        llm.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, ignore_eos=True))
        wait_until(lambda: subscriber.replay(0) != [])
        for frames in subscriber.replay(0):
            index.apply(frames[2])
    assert index.match(tokens) == 2 * PAGE
    subscriber.close()
    publisher = open_publisher(read_kv_events(events))
    assert publisher is not None, "the endpoints are free again"
    publisher.close()


def test_an_engine_without_events_logs_nothing(settings: dict[str, Any]) -> None:
    plain = {name: value for name, value in settings.items() if name != "kv_events_config"}
    engine: Engine = build_engine(EngineConfig.read(**plain))
    assert engine.block_log is None and engine.drain_blocks() == ()
    assert engine.scheduler.cache.paged.pool.observer is None


def test_a_failed_step_clears_the_index(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    events = {**settings["kv_events_config"], **paths}
    config = EngineConfig.read(**{**settings, "kv_events_config": events})
    engine = build_engine(config)
    publisher = open_publisher(config.kv_events_config)
    assert publisher is not None
    publisher.start(BlockFormat.of(engine.plan))
    client = AsyncEngine(ThreadTransport(engine), publisher=publisher)
    client.start()
    gateway = Gateway(client, publisher, config)
    try:
        tokens = list(range(80)) * 2
        assert gateway.ask(tokens) == (0, 0)
        execute = engine.executor.execute

        def fail(*arguments: Any) -> Any:
            monkeypatch.setattr(engine.executor, "execute", execute)
            raise RuntimeError("a step failed")

        monkeypatch.setattr(engine.executor, "execute", fail)
        predicted, cached = gateway.ask([1, *tokens])
        assert (predicted, cached) == (0, 0)
        assert gateway.ask(tokens) == (0, 0), "no cached content outlives a failed step"
        assert gateway.ask(tokens) == (2 * PAGE, 2 * PAGE)
    finally:
        gateway.subscriber.close()
        client.shutdown()
