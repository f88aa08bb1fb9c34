"""The publisher of KV events: frames, encodings, replay, slow subscribers, bad settings."""

import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lockstep.cache.block_log import BlocksCleared, BlocksRemoved, BlocksStored
from lockstep.cache.events_config import KVEventsConfig, read_kv_events
from lockstep.config import EngineConfig
from lockstep.engine.kv_publisher import (
    BlockFormat,
    KVEventPublisher,
    encode_event,
    open_publisher,
    with_rank,
)
from lockstep.errors import ConfigError
from tests.waiting import wait_until

FACTS = BlockFormat(2, {"sql": 1})
ON = {"enable_kv_cache_events": True}
STORED = BlocksStored([7, 2**64 - 1], None, [1, 2, 3, 4], [("s",), None], "", "GPU", 0)
LATER = BlocksStored([9], 7, [5, 6], [("sql",)], "sql", "CPU", 1)
REMOVED = BlocksRemoved([7], "GPU", 0)


class Subscriber:
    """Sockets of a subscriber, as vLLM's example has them."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        context: Any = zmq.Context.instance()
        self.events = context.socket(zmq.SUB)
        self.events.connect(endpoint)
        self.events.subscribe(topic)
        self.dealer = context.socket(zmq.DEALER)
        if replay is not None:
            self.dealer.connect(replay)

    def receive(self, milliseconds: int = 5000) -> list[bytes] | None:
        """Return the frames of the next message; None where none comes."""
        if not self.events.poll(milliseconds):
            return None
        frames: list[bytes] = self.events.recv_multipart()
        return frames

    def replay(self, start: int) -> list[list[bytes]]:
        """Return the messages that the publisher kept, from a sequence number on."""
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        messages = []
        while True:
            assert self.dealer.poll(5000), "the replay does not end"
            empty, *frames = self.dealer.recv_multipart()
            assert empty == b""
            if frames[1] == (-1).to_bytes(8, "big", signed=True):
                return messages
            messages.append(frames)

    def close(self) -> None:
        self.events.close(linger=0)
        self.dealer.close(linger=0)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """Yield a function that opens a publisher with a replay socket, and its subscriber."""
    closing: list[Any] = []

    def open_both(**settings: Any) -> tuple[KVEventPublisher, Subscriber]:
        paths = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
        names = {"endpoint": paths[0], "replay_endpoint": paths[1]}
        publisher = KVEventPublisher(KVEventsConfig(**ON, **names, **settings))
        closing.append(publisher)
        subscriber = Subscriber(*paths)
        closing.append(subscriber)
        return publisher, subscriber

    yield open_both
    for one in reversed(closing):
        one.close()


def numbers(messages: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(frames[1], "big") for frames in messages]


def connect(publisher: KVEventPublisher, subscriber: Subscriber) -> None:
    """Publish until the subscriber has a message; what comes before it joined is lost."""
    for _ in range(500):
        publisher.publish([BlocksCleared()])
        if subscriber.receive(20):
            break
    while subscriber.receive(100):
        continue


def test_frames_and_maps(opened: Any) -> None:
    publisher, subscriber = opened(topic="kv@pod@tiny")
    publisher.start(FACTS)
    connect(publisher, subscriber)
    before = time.time()
    publisher.publish([STORED, LATER, REMOVED, BlocksCleared()])
    topic, number, payload = subscriber.receive()
    assert topic == b"kv@pod@tiny" and len(number) == 8
    assert int.from_bytes(number, "big") == publisher.num_batches - 1
    seconds, events, rank = msgspec.msgpack.decode(payload)
    assert before <= seconds <= time.time() and rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [7, 2**64 - 1],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["s"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {
            "type": "BlockStored",
            "block_hashes": [9],
            "parent_block_hash": 7,
            "token_ids": [5, 6],
            "block_size": 2,
            "lora_id": 1,
            "medium": "CPU",
            "lora_name": "sql",
            "extra_keys": [["sql"]],
            "group_idx": 1,
            "kv_cache_spec_kind": "mamba",
        },
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]


def test_arrays_have_the_same_fields_in_order(opened: Any) -> None:
    publisher, subscriber = opened(event_format="array")
    publisher.start(FACTS)
    publisher.publish([STORED, LATER, REMOVED, BlocksCleared()])
    wait_until(lambda: subscriber.replay(0) != [])
    _, events, _ = msgspec.msgpack.decode(subscriber.replay(0)[0][2])
    assert events[1:] == [
        ["BlockStored", [9], 7, [5, 6], 2, 1, "CPU", "sql", [["sql"]], 1, "mamba"],
        ["BlockRemoved", [7], "GPU", 0],
        ["AllBlocksCleared"],
    ]


def test_replay_sends_the_kept_batches_as_they_were(opened: Any) -> None:
    publisher, subscriber = opened(buffer_steps=5, topic="t")
    publisher.start(FACTS)
    connect(publisher, subscriber)
    first = publisher.num_batches
    for _ in range(8):
        publisher.publish([REMOVED])
    live = [subscriber.receive() for _ in range(8)]
    assert numbers(live) == list(range(first, first + 8))
    assert subscriber.replay(0) == live[3:], "the buffer keeps the latest five"
    assert subscriber.replay(first + 6) == live[6:]
    assert subscriber.replay(first + 8) == []
    subscriber.dealer.send_multipart([b"", b"no number"])  # ignored
    assert numbers(subscriber.replay(first + 7)) == [first + 7]


def test_a_large_request_of_a_replay_is_not_received(opened: Any) -> None:
    publisher, subscriber = opened()
    publisher.start(FACTS)
    connect(publisher, subscriber)
    # A request that is received counts as a number: it would replay everything.
    subscriber.dealer.send_multipart([b"", bytes(1 << 20), bytes(8)])
    assert not subscriber.dealer.poll(500)
    assert subscriber.replay(publisher.num_batches) == []


def test_a_full_queue_drops_and_clears_afterwards(opened: Any) -> None:
    """No caller waits while the publisher's thread is stopped; subscribers never overestimate."""
    publisher, subscriber = opened(max_queue_size=3)
    began = time.monotonic()
    for _ in range(1000):
        publisher.publish([STORED])
    assert time.monotonic() - began < 1.0
    assert (publisher.num_batches, publisher.num_dropped) == (3, 997)
    publisher.start(FACTS)
    wait_until(lambda: len(subscriber.replay(0)) == 3)
    publisher.publish([REMOVED])
    publisher.publish([REMOVED])
    wait_until(lambda: len(subscriber.replay(0)) == 5)
    events = [msgspec.msgpack.decode(frames[2])[1] for frames in subscriber.replay(3)]
    tags = [[event["type"] for event in batch] for batch in events]
    assert tags == [["AllBlocksCleared", "BlockRemoved"], ["BlockRemoved"]]


def stored(number: int, parent: int | None, medium: str = "GPU") -> BlocksStored:
    """Return the event of one page."""
    return BlocksStored([number], parent, array("I", [1, 2]), [None], "", medium, 0)


def test_blocks_after_a_dropped_one_are_withheld(opened: Any) -> None:
    """Subscribers were told to forget their parents. They get them again with the whole prefix."""
    publisher, subscriber = opened(max_queue_size=1)
    publisher.publish([stored(1, None), stored(1, None, "CPU"), stored(2, 1)])
    publisher.publish([stored(3, 2)])  # dropped
    publisher.start(FACTS)
    for number, events in enumerate(
        [
            [stored(4, 3), stored(5, 2), stored(6, None)],
            [stored(7, 4), stored(8, 6), BlocksRemoved([6], "GPU", 0)],
            [stored(9, 8), stored(10, 6), stored(1, None)],
            [stored(11, 1, "CPU"), BlocksCleared(), stored(12, 1)],
        ]
    ):
        wait_until(lambda number=number: len(subscriber.replay(0)) == number + 1)
        publisher.publish(events)
    publisher.publish([stored(13, 12)])  # nothing is left of it
    wait_until(lambda: len(subscriber.replay(0)) == 5)
    batches = [msgspec.msgpack.decode(frames[2])[1] for frames in subscriber.replay(1)]
    published = [[event.get("block_hashes", event["type"]) for event in batch] for batch in batches]
    assert published == [
        ["AllBlocksCleared", [6]],
        [[8], [6]],
        [[9], [1]],
        [[11], "AllBlocksCleared"],
    ]
    assert publisher.num_batches == 5


def test_a_subscriber_that_does_not_read_slows_nothing(opened: Any) -> None:
    publisher, subscriber = opened(hwm=10)
    publisher.start(FACTS)
    connect(publisher, subscriber)
    large = STORED._replace(token_ids=[1] * 20_000)
    for _ in range(3000):
        publisher.publish([large])
    wait_until(publisher._queue.empty)
    assert publisher.num_dropped == 0, "ZeroMQ drops for that subscriber alone"
    received = 0
    while subscriber.receive(300):
        received += 1
    assert received < 3000


def test_close_publishes_what_is_queued(opened: Any) -> None:
    publisher, subscriber = opened()
    publisher.start(FACTS)
    connect(publisher, subscriber)
    for _ in range(200):
        publisher.publish([REMOVED])
    publisher.close()
    publisher.publish([REMOVED])  # ignored
    assert sum(subscriber.receive(1000) is not None for _ in range(200)) == 200
    publisher.close()


def test_a_taken_endpoint_is_named(opened: Any, tmp_path: Path) -> None:
    publisher = KVEventPublisher(KVEventsConfig(**ON, endpoint="tcp://*:*"))
    address = publisher._events.getsockopt_string(zmq.LAST_ENDPOINT)
    port = address.rpartition(":")[2]
    message = r"kv_events_config endpoint='tcp://\*:\d+' cannot be used: Address already in use"
    with pytest.raises(ConfigError, match=message):
        KVEventPublisher(KVEventsConfig(**ON, endpoint=f"tcp://*:{port}"))
    publisher.close()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[kv-events\]'"):
        open_publisher(KVEventsConfig(**ON))
    assert open_publisher(KVEventsConfig()) is None, "nothing is needed where events are off"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::]:5557", "tcp://[::]:5559"),
        ("ipc:///tmp/events", "ipc:///tmp/events_dp2"),
    ],
)
def test_ranks_have_their_own_endpoints(endpoint: str, expected: str) -> None:
    assert with_rank(endpoint, 0) == endpoint
    assert with_rank(endpoint, 2) == expected


def test_a_rank_needs_a_port() -> None:
    with pytest.raises(ConfigError, match="endpoint='tcp://host' has no port"):
        with_rank("tcp://host", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable": True}, "kv_events_config key='enable' is not allowed; allowed: enable_kv"),
        ({"publisher": "nats"}, "publisher='nats' is not allowed; allowed: zmq, null"),
        ({"endpoint": "5557"}, "endpoint='5557' is not allowed; allowed: an endpoint of ZeroMQ"),
        ({"hwm": 0}, "kv_events_config hwm=0 is not allowed; allowed: whole numbers from 1"),
        ({"event_format": "json"}, "event_format='json' is not allowed; allowed: map, array"),
        ([], r"kv_events_config=\[\] is not allowed; allowed: None or a dict"),
    ],
)
def test_bad_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.read(kv_events_config=settings)


def test_events_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="not allowed with enable_prefix_caching=False"):
        EngineConfig.read(kv_events_config=ON, enable_prefix_caching=False)
    EngineConfig.read(kv_events_config={}, enable_prefix_caching=False)


def test_vllm_settings_mean_the_same() -> None:
    assert not read_kv_events({"publisher": "zmq"}).is_on
    assert read_kv_events(ON).is_on
    assert not read_kv_events({**ON, "publisher": "null"}).is_on
    assert encode_event(REMOVED, FACTS)["block_hashes"] == [7]
