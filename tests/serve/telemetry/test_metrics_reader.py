"""Figures of a server from two readings of its /metrics."""

import pytest
import torch

from lockstep.cache.specs import Part, Spec, StorageKind
from lockstep.engine.stats import DecodeStep, Stats
from lockstep.errors import ConfigError
from lockstep.serve.telemetry.metrics import Metrics, Prefix
from lockstep.serve.telemetry.metrics_reader import Frame, MetricsReader, Reading, frame, parse
from lockstep.worker.device_rates import Rates
from lockstep.worker.roofline import PassCosts, StepCosts, StepFloors, WeightCost

KV = Part("k", (1,), torch.uint8)
"""A cache part of one byte per token."""


def counted(**counts: object) -> Stats:
    """Return stats of a server that has answered two requests with 3 drafts per step."""
    result = Stats(pages=10, accepted_at=(0, 0, 0))
    for name, value in counts.items():
        setattr(result, name, value)
    return result


def reading(metrics: Metrics, stats: Stats, at: float) -> Reading:
    result = parse(metrics.render(stats).decode(), at)
    assert result is not None
    return result


@pytest.fixture(params=["lockstep", "vllm"])
def watched(request: pytest.FixtureRequest) -> Frame:
    """Return a frame of two seconds with 40 tokens and 10 steps of one row, for both prefixes."""
    prefix: Prefix = request.param
    costs = PassCosts((WeightCost("all", 6),), (Spec(StorageKind.PAGED, (KV,)),), 0)
    metrics = Metrics("my-model", prefix, StepFloors(StepCosts(costs, None), Rates(1e6)))
    early = counted(
        generation_tokens_total=100,
        prompt_tokens_total=50,
        draft_tokens_total=60,
        accepted_tokens_total=20,
        drafts_total=20,
        accepted_at=(15, 4, 1),
        preemptions_total=3,
        decode_steps=[DecodeStep(0.010, 1, 1, 1000)],
    )
    early.requests_success_total.update(stop=2)
    late = counted(
        num_running=2,
        num_waiting=3,
        num_swapped=1,
        pages_used=4,
        generation_tokens_total=140,
        prompt_tokens_total=80,
        draft_tokens_total=90,
        accepted_tokens_total=50,
        drafts_total=30,
        accepted_at=(25, 14, 11),
        preemptions_total=4,
        prefix_queries_total=30,
        prefix_hits_total=15,
        decode_steps=[DecodeStep(0.020, 1, 1, 1000), DecodeStep(0.040, 1, 1, 3000)],
        ttft_seconds=[0.5],
        itl_seconds=[0.02, 0.04],
    )
    late.requests_success_total.update(stop=2, length=1)
    before = reading(metrics, early, 10.0)
    return frame(before, reading(metrics, late, 12.0))


def test_reader_gauges(watched: Frame) -> None:
    assert watched.model == "my-model"
    assert (watched.running, watched.waiting, watched.swapped) == (2, 3, 1)
    assert watched.cache_usage == pytest.approx(0.4)
    assert watched.ended == {"length": 1, "stop": 2}


def test_reader_rates(watched: Frame) -> None:
    now = watched.now
    assert now.seconds == 2.0
    assert now.generation_speed == 20.0
    assert now.prompt_speed == 15.0
    assert now.acceptance_length == 4.0
    assert now.acceptance_rate == 1.0
    assert now.accepted_at == (1.0, 1.0, 1.0)
    assert now.step_ms == pytest.approx(30.0)
    assert now.floor_ms == pytest.approx(2.008)
    assert now.over_floor == pytest.approx(30.0 / 2.008)
    assert now.first_token_ms == pytest.approx(500.0)
    assert now.next_token_ms == pytest.approx(30.0)
    assert now.prefix_hits == 0.5
    assert now.preemptions == 1


def test_reader_totals_since_start(watched: Frame) -> None:
    full = watched.since_start
    assert full.seconds is None and full.generation_speed is None
    assert full.acceptance_length == pytest.approx(1 + 50 / 30)
    assert full.acceptance_rate == pytest.approx(50 / 90)
    assert full.accepted_at == pytest.approx((25 / 30, 14 / 30, 11 / 30))
    assert full.step_ms == pytest.approx(70 / 3)
    assert full.preemptions == 4


def test_reader_of_idle_server() -> None:
    metrics = Metrics("m")
    still = reading(metrics, counted(), 1.0)
    now = frame(still, reading(metrics, counted(), 2.0)).now
    assert now.generation_speed == 0.0
    figures = ("acceptance_length", "acceptance_rate", "step_ms", "floor_ms", "over_floor")
    for name in (*figures, "first_token_ms"):
        assert getattr(now, name) is None
    assert now.accepted_at == ()


def test_reader_handles_counter_reset() -> None:
    """Counters that fall were reset, so their value is their increase."""
    before = reading(Metrics("m"), counted(generation_tokens_total=500), 1.0)
    after = reading(Metrics("m"), counted(generation_tokens_total=30), 2.0)
    assert frame(before, after).now.generation_speed == 30.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "python_info 1.0\n",
        "lockstep:num_requests_running{",
        'lockstep:num_requests_running{model_name="m"} many\n',
        'lockstep:num_requests_running{model_name="m"} NaN\n',
        'lockstep:num_requests_running{model_name="m"} +Inf\n',
        "lockstep:num_requests_running 1\nlockstep:request_success_total 1\n",
    ],
)
def test_other_metrics_are_not_a_reading(text: str) -> None:
    assert parse(text, 0.0) is None


@pytest.mark.parametrize(
    ("url", "requested"),
    [
        ("localhost:9000", "http://localhost:9000/metrics"),
        ("http://a:1/", "http://a:1/metrics"),
        ("https://a/llm", "https://a/llm/metrics"),
        ("http://a:1/v1", "http://a:1/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_reader_url(url: str, requested: str) -> None:
    assert MetricsReader(url).url == requested


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "http://", "http://a:b", "http://a:0", "//"]
)
def test_invalid_reader_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url=.*allowed: http://HOST:PORT"):
        MetricsReader(url)
