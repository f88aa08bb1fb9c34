"""Notes that lockstep serve prints before it loads the model."""

import pytest

from lockstep.cache.events_config import KVEventsConfig
from lockstep.cli.serve import note_events

TO = "tcp://gateway:5557"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ""),
        (KVEventsConfig(publisher="null"), ""),
        (KVEventsConfig(), "kv_events_config publishes nothing without enable_kv_cache_events"),
        (KVEventsConfig(enable_kv_cache_events=True), "KV events are published at tcp://*:5557."),
        (
            KVEventsConfig(enable_kv_cache_events=True, endpoint=TO),
            f"KV events are sent to {TO}, which a subscriber has to bind.",
        ),
    ],
    ids=["no settings", "null publisher", "not enabled", "bound", "connected"],
)
def test_destination_of_events_is_noted(
    config: KVEventsConfig | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note_events(config)
    lines = capsys.readouterr().err.replace("\n", " ")
    assert lines.startswith(expected) if expected else not lines
