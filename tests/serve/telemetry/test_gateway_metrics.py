"""Every metric that gateways read of vLLM: its type, its labels and its value under load."""

from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.engine.stats import DecodeStep, Stats
from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.serve.telemetry.metrics import Metrics
from lockstep.text.processor import Processor
from tests.serve.api_calls import fetch
from tests.serve.telemetry.records import finished_record

MODEL = {"model_name"}
SIZES = {"block_size": "64", "num_gpu_blocks": "10"}
ADAPTERS = ("sql", "chat")


class Read(NamedTuple):
    """Metric that a gateway reads. labels: label names that it relies on."""

    kind: str
    labels: frozenset[str] = frozenset()


GAUGE = Read("gauge")
COUNTER = Read("counter")
HISTOGRAM = Read("histogram")
LORA = Read("gauge", frozenset({"running_lora_adapters", "waiting_lora_adapters", "max_lora"}))
CACHE = Read("gauge", frozenset({"block_size", "num_gpu_blocks"}))

GATEWAYS: dict[str, dict[str, Read]] = {
    # llm-d-router, extractor/metrics/factories.go; Gateway API Inference Extension, its protocol.
    "llm-d": {
        "num_requests_waiting": GAUGE,
        "num_requests_running": GAUGE,
        "kv_cache_usage_perc": GAUGE,
        "gpu_cache_usage_perc": GAUGE,
        "lora_requests_info": LORA,
        "cache_config_info": CACHE,
    },
    # aibrix, pkg/metrics/metrics.go.
    "AIBrix": {
        "num_requests_waiting": GAUGE,
        "num_requests_running": GAUGE,
        "num_requests_swapped": GAUGE,
        "engine_sleep_state": Read("gauge", frozenset({"sleep_state"})),
        "num_preemptions_total": COUNTER,
        "request_success_total": Read("counter", frozenset({"finished_reason"})),
        "e2e_request_latency_seconds": HISTOGRAM,
        "request_queue_time_seconds": HISTOGRAM,
        "request_inference_time_seconds": HISTOGRAM,
        "time_to_first_token_seconds": HISTOGRAM,
        "request_prefill_time_seconds": HISTOGRAM,
        "prompt_tokens_total": COUNTER,
        "request_prompt_tokens": HISTOGRAM,
        "time_per_output_token_seconds": HISTOGRAM,
        "inter_token_latency_seconds": HISTOGRAM,
        "request_time_per_output_token_seconds": HISTOGRAM,
        "request_decode_time_seconds": HISTOGRAM,
        "generation_tokens_total": COUNTER,
        "iteration_tokens_total": HISTOGRAM,
        "request_generation_tokens": HISTOGRAM,
        "request_max_num_generation_tokens": HISTOGRAM,
        "gpu_cache_usage_perc": GAUGE,
        "cpu_cache_usage_perc": GAUGE,
        "kv_cache_usage_perc": GAUGE,
        "prefix_cache_queries_total": COUNTER,
        "prefix_cache_hits_total": COUNTER,
        "external_prefix_cache_queries_total": COUNTER,
        "external_prefix_cache_hits_total": COUNTER,
        "lora_requests_info": LORA,
    },
    # production-stack, vllm_router/stats/engine_stats.py.
    "production stack": {
        "num_requests_waiting": GAUGE,
        "num_requests_running": GAUGE,
        "gpu_prefix_cache_hit_rate": GAUGE,
        "gpu_prefix_cache_hits_total": COUNTER,
        "gpu_prefix_cache_queries_total": COUNTER,
        "gpu_cache_usage_perc": GAUGE,
    },
    # Names in the binaries of vllm-router 0.1.17 and smg 1.13.0.
    "vllm-router": {"num_requests_running": GAUGE, "kv_cache_usage_perc": GAUGE},
    "smg": {
        "num_requests_waiting": GAUGE,
        "num_requests_running": GAUGE,
        "kv_cache_usage_perc": GAUGE,
        "gpu_cache_usage_perc": GAUGE,
        "gpu_prefix_cache_hit_rate": GAUGE,
    },
}
"""Gateway -> name without prefix -> what it reads.

Left out: what a server without the feature does not have (nixl_*, proposed LoRA residency metrics),
and num_requests_success_total, a name of AIBrix that vLLM has not either. Dynamo reads no metrics
of an engine's server: it passes them on.
"""


def scraped(text: str) -> dict[str, Any]:
    """Return name -> (type, samples), with the name that gateways use."""
    families = {}
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" * (family.type == "counter")
        families[name] = (family.type, family.samples)
    return families


def loaded() -> Stats:
    """Return the statistics of a server under load."""
    stats = Stats(
        num_running=3,
        num_waiting=2,
        num_swapped=1,
        pages_used=5,
        pages=20,
        host_pages_used=1,
        host_pages=4,
        preemptions_total=1,
        prompt_tokens_total=500,
        generation_tokens_total=70,
        prefix_queries_total=400,
        prefix_hits_total=100,
        host_queries_total=300,
        host_hits_total=30,
    )
    stats.requests_success_total["stop"] = 4
    for name in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
        stats.observe(name, 0.02)
    stats.observe("iteration_tokens", 64)
    stats.observe("decode_steps", DecodeStep(0.01, 3, 0, 100))
    return stats


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_gateways_find_the_metrics_that_they_read(
    gateway: str, server: Any, processor: Processor
) -> None:
    metrics = Metrics("tiny", "vllm", cache=SIZES, adapters=ADAPTERS)
    metrics.observe(finished_record())
    metrics.read(loaded())
    service = Service(server.client, processor, "tiny", "ls-test", adapters=ADAPTERS)
    server.app = create_app(service, metrics=metrics)
    families = scraped(fetch(server, "GET", "/metrics").text)
    for name, read in GATEWAYS[gateway].items():
        assert f"vllm:{name}" in families, name
        kind, samples = families[f"vllm:{name}"]
        assert kind == read.kind, name
        assert samples, name
        for sample in samples:
            assert MODEL | read.labels <= set(sample.labels), name


def test_values_are_those_of_the_server() -> None:
    text = Metrics("tiny", "vllm", cache=SIZES, adapters=ADAPTERS).render(loaded()).decode()
    values = {s.name: s for _, samples in scraped(text).values() for s in samples}
    for name, value in {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "num_requests_swapped": 1,
        "kv_cache_usage_perc": 0.25,
        "gpu_cache_usage_perc": 0.25,
        "cpu_cache_usage_perc": 0.25,
        "gpu_prefix_cache_hit_rate": 0.25,
        "gpu_prefix_cache_hits_total": 100,
        "gpu_prefix_cache_queries_total": 400,
        "prefix_cache_hits_total": 100,
        "external_prefix_cache_hits_total": 30,
    }.items():
        assert values[f"vllm:{name}"].value == value, name
    labels = values["vllm:lora_requests_info"].labels
    assert labels["running_lora_adapters"] == "sql,chat" and labels["max_lora"] == "2"
    assert values["vllm:lora_requests_info"].value > 1.7e9, "the time of the latest change"
    assert values["vllm:cache_config_info"].labels["block_size"] == "64"


def test_states_of_sleep() -> None:
    _, samples = scraped(Metrics("tiny", "vllm").render(Stats()).decode())[
        "vllm:engine_sleep_state"
    ]
    states = {sample.labels["sleep_state"]: sample.value for sample in samples}
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
