"""Publisher of KV events over ZeroMQ, in the wire format of vLLM.

A message has three frames: the topic, a sequence number of 8 bytes (big-endian), and a batch in
MessagePack. A batch is [seconds since 1970, events, data-parallel rank]. docs/kv_events.md lists
the fields of an event.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.cache.block_log import (
    MEDIA,
    PAGE_GROUP,
    STATE_GROUP,
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
)
from lockstep.cache.events_config import KVEventsConfig
from lockstep.config import Plan
from lockstep.errors import ConfigError, install_extra

if TYPE_CHECKING:
    import zmq

SPEC_KINDS = {PAGE_GROUP: "full_attention", STATE_GROUP: "mamba"}
"""Group -> vLLM's name of its storage kind. Pages of latents count as attention's, too."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the last message of a replay."""
CLOSE_SECONDS = 2.0
"""Time limit for publishing what is queued when the server ends."""
MAX_REQUEST_BYTES = 1024
"""Maximum size of a frame to the replay socket: a client's name takes up to 255 bytes."""
BOUND_BY = ("*", "::", "ipc://", "inproc://")
"""Parts of endpoints that are bound. vLLM's users rely on this rule."""


@dataclass(frozen=True)
class BlockFormat:
    """Facts about blocks that events repeat. adapter_ids: number of each LoRA adapter by name."""

    page_size: int
    adapter_ids: Mapping[str, int]

    @classmethod
    def of(cls, plan: Plan) -> "BlockFormat":
        """Return the facts of an engine. Adapters are numbered from 1, in their order."""
        return cls(plan.page_size, {name: i for i, name in enumerate(plan.adapters, 1)})


def encode_event(event: BlockEvent, block_format: BlockFormat) -> dict[str, Any]:
    """Return an event as a map of vLLM's fields, in vLLM's order."""
    if isinstance(event, BlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlocksRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": event.hashes,
            "medium": event.medium,
            "group_idx": event.group,
        }
    return {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": list(event.token_ids),
        "block_size": block_format.page_size,
        "lora_id": block_format.adapter_ids.get(event.adapter),
        "medium": event.medium,
        "lora_name": event.adapter or None,
        "extra_keys": event.extra_keys,
        "group_idx": event.group,
        "kv_cache_spec_kind": SPEC_KINDS[event.group],
    }


class _KnownPages:
    """Pages that subscribers know.

    The engine's log has the parent of a block before the block. But a batch may have been dropped
    since, and a replica may have been without a publisher.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, set[int]] = {medium: set() for medium in MEDIA}

    def clear(self) -> None:
        """Note that subscribers know no page any more."""
        for hashes in self._hashes.values():
            hashes.clear()

    def filter(self, events: Sequence[BlockEvent]) -> list[BlockEvent]:
        """Return the events without the blocks whose parent subscribers do not know."""
        result: list[BlockEvent] = []
        for event in events:
            if isinstance(event, BlocksCleared):
                self.clear()
            elif isinstance(event, BlocksStored):
                parent = event.parent
                if parent is not None and not any(parent in h for h in self._hashes.values()):
                    continue
                if event.group == PAGE_GROUP:
                    self._hashes[event.medium].update(event.hashes)
            elif event.group == PAGE_GROUP:
                self._hashes[event.medium].difference_update(event.hashes)
            result.append(event)
        return result


class KVEventPublisher:
    """Publisher of events; a thread encodes and sends them.

    publish() never waits. Where the queue is full, it drops the batch, and the next one begins with
    AllBlocksCleared: a subscriber may then know too few blocks, but none that is gone. Later blocks
    whose parent it does not know are withheld. For a slow subscriber ZeroMQ drops messages; it
    finds a gap in the sequence numbers and may ask the replay socket for them.

    rank: data-parallel rank, which is added to the ports of tcp endpoints. num_batches: batches
    queued so far. num_dropped: batches dropped so far.

    The constructor opens the sockets. Raises ConfigError where an endpoint cannot be used, or
    ZeroMQ is not installed.
    """

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        try:
            import msgspec
            import zmq
        except ImportError:
            raise ConfigError(
                "kv_events_config needs pyzmq and msgspec, which are not installed: "
                f"{install_extra('kv-events')}, or leave --kv-events-config out."
            ) from None
        self._config = config
        self._rank = rank
        self._zmq = zmq
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[float, Sequence[BlockEvent]]] = queue.Queue(
            config.max_queue_size
        )
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._has_gap = False
        self._known_pages = _KnownPages()
        self._is_closing = False
        self._block_format: BlockFormat | None = None
        self._thread: threading.Thread | None = None
        self.num_batches = 0
        self.num_dropped = 0
        # endpoint and replay_endpoint may be inproc, so that the process has one context.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._events = context.socket(zmq.PUB)
        self._events.set_hwm(config.hwm)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.set_hwm(config.buffer_steps + 1)  # a replay may send all of the buffer
        # ZeroMQ closes a connection that sends more; otherwise it would store any size.
        self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            self._open(self._events, "endpoint", config.endpoint)
            if config.replay_endpoint is not None:
                self._open(self._replay, "replay_endpoint", config.replay_endpoint, bind=True)
        except BaseException:
            self._close_sockets()
            raise
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)

    def start(self, block_format: BlockFormat) -> None:
        """Start the thread. Events queued before are published first."""
        self._block_format = block_format
        self._thread = threading.Thread(target=self._run, name="lockstep-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Queue a batch of events; one thread at a time may call it."""
        if self._is_closing:
            return
        known_events = self._known_pages.filter(events)
        batch = [BlocksCleared(), *known_events] if self._has_gap else known_events
        if not batch:
            return
        try:
            self._queue.put_nowait((time.time(), batch))
        except queue.Full:
            self.num_dropped += 1
            self._has_gap = True
            self._known_pages.clear()
            return
        self._has_gap = False
        self.num_batches += 1
        self._wake()

    def close(self) -> None:
        """Publish what is queued, for CLOSE_SECONDS at most, and close the sockets."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS + 1.0)
        else:
            self._close_sockets()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"\0")
        except BlockingIOError:  # the pipe is full: the thread will wake anyway
            return

    def _open(
        self, socket: "zmq.Socket[bytes]", name: str, endpoint: str, bind: bool = False
    ) -> None:
        """Bind or connect a socket. Raises ConfigError."""
        address = with_rank(endpoint, self._rank)
        try:
            if bind or is_bound(endpoint):
                socket.bind(address)
            else:
                socket.connect(address)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config {name}={address!r} cannot be used: {error.strerror}. Name an "
                "endpoint that is free, such as tcp://*:5557."
            ) from None

    def _close_sockets(self) -> None:
        linger = int(CLOSE_SECONDS * 1000) if self._thread is not None else 0
        self._events.close(linger=linger)
        self._replay.close(linger=0)

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake_reader, self._zmq.POLLIN)
        if self._config.replay_endpoint is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = dict(poller.poll())
                if self._wake_reader in ready:
                    os.read(self._wake_reader, 4096)
                self._send_queued()
                if self._replay in ready:
                    self._answer_replay()
            self._send_queued(time.monotonic() + CLOSE_SECONDS)
        finally:
            self._close_sockets()

    def _send_queued(self, deadline: float | None = None) -> None:
        """Encode and send the queued batches."""
        while deadline is None or time.monotonic() < deadline:
            try:
                seconds, events = self._queue.get_nowait()
            except queue.Empty:
                return
            number = self._next_number.to_bytes(8, "big")
            self._next_number += 1
            batch = self._encode([seconds, [self._encoded(event) for event in events], self._rank])
            self._sent.append((number, batch))
            # A PUB socket never blocks: it drops what a slow subscriber has no room for.
            self._events.send_multipart((self._topic, number, batch))

    def _encoded(self, event: BlockEvent) -> dict[str, Any] | list[Any]:
        assert self._block_format is not None
        fields = encode_event(event, self._block_format)
        return fields if self._config.event_format == "map" else list(fields.values())

    def _answer_replay(self) -> None:
        """Send the batches from a number on to the client that asks, then the end marker.

        A client whose queue is full, or that has gone, gets no more. Frames after the empty one are
        those of a live message.
        """
        frames = self._replay.recv_multipart()
        if len(frames) < 2 or len(frames[-1]) != 8:
            return  # no request of this protocol
        client = frames[0]
        for number, batch in self._sent:
            if number >= frames[-1]:  # big-endian numbers of one length compare as bytes
                self._replay.send_multipart((client, b"", self._topic, number, batch))
        self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def is_bound(endpoint: str) -> bool:
    """Return whether the server binds an endpoint; it connects to others."""
    return any(part in endpoint for part in BOUND_BY)


def with_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: tcp ports grow by it, other names get _dpRANK.

    Raises ConfigError where a tcp endpoint has no port.
    """
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(
            f"kv_events_config endpoint={endpoint!r} has no port, to which data-parallel rank "
            f"{rank} is added. Name one such as tcp://*:5557."
        )
    return f"{address}:{int(port) + rank}"


def open_publisher(config: KVEventsConfig | None, rank: int = 0) -> KVEventPublisher | None:
    """Return a publisher with open sockets, not started; None where events are off.

    Raises ConfigError.
    """
    return KVEventPublisher(config, rank) if config is not None and config.is_on else None


def open_publishers(config: KVEventsConfig | None, count: int) -> list[KVEventPublisher]:
    """Return a publisher for each of several engines, none where events are off.

    Raises ConfigError.
    """
    publishers: list[KVEventPublisher] = []
    try:
        for rank in range(count):
            if (publisher := open_publisher(config, rank)) is not None:
                publishers.append(publisher)
    except BaseException:
        for publisher in publishers:
            publisher.close()
        raise
    return publishers
