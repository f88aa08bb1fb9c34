"""Throughput lines in the log."""

import logging

import pytest

from lockstep.engine.stats import Stats
from lockstep.serve.telemetry.throughput import THROUGHPUT_LOGGER, ThroughputLogger


def test_throughput_is_logged_while_working_and_once_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, THROUGHPUT_LOGGER)
    lines = ThroughputLogger(Stats())
    lines.log(Stats(), 10.0)
    assert not caplog.messages, "an idle server logs nothing"
    busy = Stats(
        num_running=3,
        num_waiting=2,
        pages=10,
        pages_used=5,
        prompt_tokens_total=1000,
        generation_tokens_total=500,
        prefix_queries_total=100,
        prefix_hits_total=25,
        drafts_total=100,
        draft_tokens_total=300,
        accepted_tokens_total=180,
    )
    lines.log(busy, 10.0)
    (line,) = caplog.messages
    assert line == (
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 50.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 25.0%, "
        "Mean acceptance length: 2.80, Avg draft acceptance rate: 60.0%"
    )
    done = Stats(pages=10, prompt_tokens_total=1000, generation_tokens_total=500)
    for _ in range(3):
        lines.log(done, 10.0)
    assert len(caplog.messages) == 2
