"""Settings of KV events, in vLLM's keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lockstep.settings import Settings, check_names, setting

MAX_STEPS = 10_000_000
"""Maximum of the sizes below: more batches than a server publishes in days."""
EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'

Endpoint = Annotated[str, Field(max_length=2000, pattern=r"^(tcp|ipc|inproc)://\S+$")]
Count = Annotated[int, Field(ge=1, le=MAX_STEPS)]
_ENDPOINT = "an endpoint of ZeroMQ such as tcp://*:5557, tcp://gateway:5557 or ipc:///tmp/events"
_NAME_ONE = "Name an endpoint."
_CHOOSE_ONE = "Choose one of them."


@dataclass(frozen=True)
class KVEventsConfig(Settings):
    """Events of cached blocks over ZeroMQ, for gateways that route by prefix."""

    within: ClassVar[str] = "kv_events_config "

    enable_kv_cache_events: bool = setting(
        False, "publish the blocks that are cached and removed", remedy=_CHOOSE_ONE
    )
    publisher: Literal["zmq", "null"] | None = setting(
        None,
        "zmq, or null to publish nothing; default: zmq",
        allowed="zmq, null",
        remedy=_CHOOSE_ONE,
    )
    endpoint: Endpoint = setting(
        "tcp://*:5557",
        "PUB socket; bound if it contains * or :: or is ipc or inproc, else connected to",
        allowed=_ENDPOINT,
        remedy=_NAME_ONE,
    )
    replay_endpoint: Endpoint | None = setting(
        None,
        "ROUTER socket, always bound, at which subscribers ask for batches that they missed",
        allowed=_ENDPOINT,
        remedy=_NAME_ONE,
    )
    buffer_steps: Count = setting(10_000, "latest batches that can be replayed")
    hwm: Count = setting(
        100_000, "batches that wait for a slow subscriber; more are dropped for it"
    )
    max_queue_size: Count = setting(
        100_000, "batches that wait for the publisher; more are dropped and counted"
    )
    topic: str = setting(
        "",
        "first frame of every message, by which subscribers choose; llm-d reads kv@POD@MODEL",
        allowed="text",
        remedy="Name a topic, or leave it out.",
    )
    event_format: Literal["map", "array"] = setting(
        "map",
        "encoding of an event: map, as in vLLM since June 2026, or array, as before",
        remedy=_CHOOSE_ONE,
    )

    @property
    def is_on(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def read_kv_events(value: Mapping[str, Any] | KVEventsConfig | None) -> Any:
    """Return the settings of a mapping. Raises ConfigError; other values are returned unchanged."""
    if not isinstance(value, Mapping):
        return value
    check_names(KVEventsConfig, value, "kv_events_config key", "Remove or rename it.")
    return KVEventsConfig(**value)
