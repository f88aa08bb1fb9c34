"""Content of /metrics with both prefixes, and the metrics that the dashboard uses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cache.specs import Part, Spec, StorageKind
from lockstep.engine.stats import DecodeStep, Stats
from lockstep.outputs import RequestMetrics
from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.serve.telemetry.metrics import Metrics, Prefix
from lockstep.worker.device_rates import Rates
from lockstep.worker.roofline import PassCosts, StepCosts, StepFloors, WeightCost
from tests.serve.api_calls import fetch
from tests.serve.telemetry.records import finished_record

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy/grafana/lockstep.json"
SAMPLE = re.compile(r"^([a-z_]+:[a-z_0-9]+)[{ ]", re.MULTILINE)
COSTS = PassCosts(
    (WeightCost("all", 3),), (Spec(StorageKind.PAGED, (Part("k", (1,), torch.uint8),)),), 0
)
FLOORS = StepFloors(StepCosts(COSTS, None), Rates(1000.0))
"""Floors of a model whose steps move 3 bytes and one per cached token, at 1,000 bytes/s."""


OF_VLLM = (
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_params_max_tokens_sum",
    "request_params_n_sum",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "request_time_per_output_token_seconds_bucket",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
)


def all_metric_names() -> set[str]:
    """The names of all samples, of a model whose floors are known."""
    metrics = Metrics("m", floors=FLOORS, cache={"block_size": "64"})
    metrics.observe(finished_record())
    return samples(metrics.render(stats()).decode())


def stats() -> Stats:
    result = Stats(num_swapped=2, drafts_total=10, accepted_at=(7, 3))
    result.requests_success_total["stop"] = 1
    for name in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
        result.observe(name, 0.03)
    result.decode_steps = [DecodeStep(0.004, 1, 3, 100), DecodeStep(0.02, 2, 3, 300)]
    result.iteration_tokens = [1, 100]
    return result


def samples(text: str) -> set[str]:
    return set(SAMPLE.findall(text))


def test_drafts_by_position_and_steps() -> None:
    metrics = Metrics("m")
    text = metrics.render(stats()).decode()
    name = "lockstep:spec_decode_num_accepted_tokens_per_pos_total"
    assert f'{name}{{model_name="m",position="0"}} 7.0' in text
    assert f'{name}{{model_name="m",position="1"}} 3.0' in text
    assert 'lockstep:spec_decode_num_drafts_total{model_name="m"} 10.0' in text
    assert 'lockstep:num_requests_swapped{model_name="m"} 2.0' in text
    assert 'lockstep:decode_step_seconds_bucket{le="0.005",model_name="m"} 1.0' in text
    assert 'lockstep:decode_step_seconds_count{model_name="m"} 2.0' in text


@pytest.mark.parametrize("prefix", ["lockstep", "vllm"])
def test_host_memory_metrics(prefix: Prefix) -> None:
    metrics = Metrics("m", prefix)
    result = Stats(
        host_pages=8,
        host_pages_used=2,
        host_hits_total=128,
        host_queries_total=200,
        offloaded_total=5,
        offloaded_bytes_total=5000,
        fetched_total=3,
        fetched_bytes_total=3000,
    )
    metrics.render(Stats(offloaded_total=1, offloaded_bytes_total=1000))
    lines = metrics.render(result).decode().splitlines()
    for name, label, value in (
        ("kv_offload_cpu_cache_usage_perc", "", 0.25),
        ("external_prefix_cache_hits_total", "", 128.0),
        ("external_prefix_cache_queries_total", "", 200.0),
        ("kv_offload_total_units_total", ',transfer_type="GPU_to_CPU"', 5.0),
        ("kv_offload_total_units_total", ',transfer_type="CPU_to_GPU"', 3.0),
        ("kv_offload_total_bytes_total", ',transfer_type="GPU_to_CPU"', 5000.0),
        ("kv_offload_total_bytes_total", ',transfer_type="CPU_to_GPU"', 3000.0),
    ):
        assert f'{prefix}:{name}{{model_name="m"{label}}} {value}' in lines


def test_step_floor_metrics() -> None:
    """Steps of stats() are compared with the roofline times of FLOORS."""
    text = Metrics("m", floors=FLOORS).render(stats()).decode()
    label = '{model_name="m"}'
    result = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.endswith(label):
            result[name.removesuffix(label).removeprefix("lockstep:")] = float(value)
    first = (3 + 100 + 4) / 1000
    second = (3 + 300 + 8) / 1000
    assert result["decode_step_floor_seconds_total"] == pytest.approx(first + second)
    assert result["decode_step_over_floor_sum"] == pytest.approx(0.004 / first + 0.02 / second)
    assert result["memory_bytes_per_second"] == 1000.0


@pytest.mark.parametrize("prefix", ["lockstep", "vllm"])
def test_metric_names_differ_only_by_prefix(server: Any, processor: Any, prefix: Prefix) -> None:
    server.client.counts = stats()
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, metrics=Metrics("tiny", prefix))
    text = fetch(server, "GET", "/metrics").text
    assert f'{prefix}:num_requests_running{{model_name="tiny"}} 0.0' in text
    mine = Metrics("m").render(stats()).decode()
    same = {name.replace("lockstep:", f"{prefix}:") for name in samples(mine)}
    more = samples(text) - same
    assert same <= samples(text)
    assert bool(more) == (prefix == "vllm"), "what only readers of vLLM's names know"
    assert {name.removesuffix("_bucket") for name in more if "_created" not in name} >= {
        "vllm:gpu_cache_usage_perc",
        "vllm:time_per_output_token_seconds",
        "vllm:lora_requests_info",
    } or prefix == "lockstep"


def test_cache_config_metric() -> None:
    sizes = {"block_size": "64", "num_gpu_blocks": "10"}
    text = Metrics("m", "vllm", cache=sizes).render(stats()).decode()
    (line,) = [x for x in text.splitlines() if x.startswith("vllm:cache_config_info{")]
    assert 'block_size="64"' in line and 'num_gpu_blocks="10"' in line and line.endswith(" 1.0")


def test_load_of_idle_server(server: Any) -> None:
    assert fetch(server, "GET", "/load").json() == {"server_load": 0}


def test_tokens_per_step_histogram() -> None:
    text = Metrics("m").render(stats()).decode()
    assert 'lockstep:iteration_tokens_total_sum{model_name="m"} 101.0' in text


def test_finished_request_metrics() -> None:
    metrics = Metrics("m")
    metrics.observe(finished_record())
    metrics.observe(finished_record(metrics=(RequestMetrics(),), max_completion_tokens=0))
    result = metrics.render(stats()).decode()
    label = '{model_name="m"}'
    assert f"lockstep:request_prompt_tokens_count{label} 2.0" in result
    assert f"lockstep:request_max_num_generation_tokens_sum{label} 4.0" in result
    assert f"lockstep:request_params_n_sum{label} 4.0" in result
    for name, seconds in (("queue", 0.5), ("prefill", 0.5), ("decode", 1.25), ("inference", 1.75)):
        assert f"lockstep:request_{name}_time_seconds_count{label} 1.0" in result
        assert f"lockstep:request_{name}_time_seconds_sum{label} {seconds}" in result
    (line,) = [x for x in result.splitlines() if "request_time_per_output_token_seconds_sum" in x]
    assert float(line.rpartition(" ")[2]) == pytest.approx(1.25 / 3)


def test_metrics_of_vllm_dashboards_exist() -> None:
    """The metrics that dashboards in vLLM's repository use, without those of older releases."""
    metrics = Metrics("m", "vllm")
    metrics.observe(finished_record())
    received = samples(metrics.render(stats()).decode())
    assert {f"vllm:{name}" for name in OF_VLLM} <= received


def test_dashboard_uses_existing_metrics() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    requested = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"lockstep:[a-z_0-9]+", target["expr"])
    }
    assert len(requested) > 15 and all(panel["targets"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for index in (panel["gridPos"] for panel in panels)
        for x in range(index["x"], index["x"] + index["w"])
        for y in range(index["y"], index["y"] + index["h"])
    ]
    assert len(set(cells)) == len(cells), "no panel covers another"
    assert requested <= all_metric_names()


def test_dashboard_shows_every_metric() -> None:
    """Histograms count by their buckets; metrics that Prometheus adds do not count."""
    text = DASHBOARD.read_text()
    bare = {
        name for name in all_metric_names() if not name.endswith(("_created", "_sum", "_count"))
    }
    assert not [name for name in bare if name not in text]
