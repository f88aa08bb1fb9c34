"""The engine's counters in Prometheus' text form; names as vLLM's but for what stands in front."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lockstep.config import EngineConfig, Plan
from lockstep.engine.stats import DecodeStep, Stats
from lockstep.serve.telemetry.request_record import Record
from lockstep.worker.roofline import StepFloors

_GAUGES = {
    "num_running": ("num_requests_running", "Requests that are running."),
    "num_waiting": ("num_requests_waiting", "Requests that wait."),
    "num_swapped": ("num_requests_swapped", "Requests that wait in host memory."),
}
_COUNTERS = {
    "prompt_tokens_total": ("prompt_tokens", "Prompt tokens received."),
    "generation_tokens_total": ("generation_tokens", "Tokens generated."),
    "drafts_total": ("spec_decode_num_drafts", "Rows of steps that brought drafts."),
    "draft_tokens_total": ("spec_decode_num_draft_tokens", "Tokens drafted."),
    "accepted_tokens_total": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "steps_total": ("decode_steps", "Decode steps launched."),
    "preemptions_total": ("num_preemptions", "Requests moved to host memory."),
    "restarts_total": ("engine_restarts", "Engine processes that were lost and started again."),
    "prefix_hits_total": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "prefix_queries_total": ("prefix_cache_queries", "Prompt tokens looked up there."),
    "host_hits_total": ("external_prefix_cache_hits", "Of these, found in host memory."),
    "host_queries_total": ("external_prefix_cache_queries", "Prompt tokens looked up in it."),
}
_TRANSFERS = {
    "GPU_to_CPU": ("offloaded_total", "offloaded_bytes_total"),
    "CPU_to_GPU": ("fetched_total", "fetched_bytes_total"),
}
"""transfer_type -> how many moved, and their bytes."""
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_TOKENS = (1.0, *(float(8 << power) for power in range(12)))
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_HISTOGRAMS = {
    "ttft_seconds": ("time_to_first_token_seconds", "Arrival to first token.", _LONG),
    "itl_seconds": ("inter_token_latency_seconds", "Between two updates of a request.", _SHORT),
    "e2e_seconds": ("e2e_request_latency_seconds", "Arrival to last token.", _LONG),
    "iteration_tokens": (
        "iteration_tokens_total",
        "Tokens of a step: of prompts, and generated.",
        _STEP_TOKENS,
    ),
}
_OLDER_NAMES = {"itl_seconds": "time_per_output_token_seconds"}
"""Names under which vLLM told the same histograms before: dashboards still read them."""
_RATIOS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0)
_STEPS = {
    "seconds": ("decode_step_seconds", "A decode step, as the device measured it.", _SHORT),
    "over_floor": ("decode_step_over_floor", "A decode step over its floor.", _RATIOS),
}


class _OfRequest(NamedTuple):
    """A histogram over requests that have ended. value: None where it is not known."""

    name: str
    help: str
    buckets: tuple[float, ...]
    value: Callable[[Record], float | None]


def _per_token(record: Record) -> float | None:
    """Seconds between two tokens of the longest completion, on the mean."""
    seconds = record.latencies.get("decode")
    return None if seconds is None or record.longest < 2 else seconds / (record.longest - 1)


_REQUESTS = (
    _OfRequest(
        "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS, lambda r: r.prompt_tokens
    ),
    _OfRequest(
        "request_generation_tokens",
        "Tokens written for a request.",
        _TOKENS,
        lambda r: r.completion_tokens,
    ),
    _OfRequest(
        "request_max_num_generation_tokens",
        "Tokens of a request's longest completion.",
        _TOKENS,
        lambda r: r.longest,
    ),
    _OfRequest(
        "request_params_max_tokens",
        "max_tokens of a request.",
        _TOKENS,
        lambda r: r.params.max_tokens,
    ),
    _OfRequest("request_params_n", "n of a request.", _COUNTS, lambda r: r.params.n),
    _OfRequest(
        "request_queue_time_seconds",
        "Arrival to a row in the batch.",
        _LONG,
        lambda r: r.latencies.get("queue"),
    ),
    _OfRequest(
        "request_prefill_time_seconds",
        "A row in the batch to the first token.",
        _LONG,
        lambda r: r.latencies.get("prefill"),
    ),
    _OfRequest(
        "request_decode_time_seconds",
        "First token to last token.",
        _LONG,
        lambda r: r.latencies.get("decode"),
    ),
    _OfRequest(
        "request_inference_time_seconds",
        "A row in the batch to the last token.",
        _LONG,
        lambda r: r.latencies.get("inference"),
    ),
    _OfRequest(
        "request_time_per_output_token_seconds",
        "Between two tokens of a request, mean.",
        _SHORT,
        _per_token,
    ),
)

Kind = TypeVar("Kind", Gauge, Counter, Histogram)
Prefix = Literal["lockstep", "vllm"]
"""What stands in front of the names."""


def cache_config(config: EngineConfig, plan: Plan) -> dict[str, str]:
    """Return what gateways and dashboards read of a cache, by vLLM's names."""
    return {
        "block_size": str(plan.page_size),
        "num_gpu_blocks": str(plan.num_pages),
        "num_cpu_blocks": str(plan.host_pages),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "mamba_ssm_cache_dtype": config.mamba_ssm_cache_dtype,
    }


class Metrics:
    """Turns Stats into Prometheus' text; every label set carries the model's name. floors: those of
    the engine's steps, None where they are not known. cache: see cache_config."""

    def __init__(
        self,
        model_name: str,
        prefix: Prefix = "lockstep",
        floors: StepFloors | None = None,
        cache: Mapping[str, str] | None = None,
    ) -> None:
        self.floors = floors
        self.registry = CollectorRegistry()
        self._model = model_name
        self._prefix = prefix
        is_vllm = prefix == "vllm"  # its readers know older names and adapters, too
        self._seen: dict[str, float] = {}
        self._gauges = {k: self._new(Gauge, n, h) for k, (n, h) in _GAUGES.items()}
        rate = self._new(
            Gauge,
            "memory_bytes_per_second",
            "The memory's rate that floors are computed with; 0 where there are none.",
        )
        rate.labels(model_name).set(floors.rates.memory if floors else 0)
        self._usages = [
            self._new(Gauge, name, "Used share of pages.")
            for name in ("kv_cache_usage_perc", *(["gpu_cache_usage_perc"] if is_vllm else []))
        ]
        self._add_constants(cache or {}, adapters=is_vllm)
        self._counters = {k: self._new(Counter, n, h) for k, (n, h) in _COUNTERS.items()}
        self._floor = self._new(
            Counter, "decode_step_floor_seconds", "The least time that the decode steps could take."
        )
        moved = "copied to host memory and back."
        self._transfers = [
            self._new(Counter, f"kv_offload_total_{name}", f"{what} {moved}", "transfer_type")
            for name, what in (
                ("units", "Pages and snapshots"),
                ("bytes", "Bytes of pages and snapshots"),
            )
        ]
        self._host_usage = self._new(
            Gauge,
            "kv_offload_cpu_cache_usage_perc",
            "Used share of the host memory behind the cache.",
        )
        self._success = self._new(
            Counter, "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._accepted_at = self._new(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place from 0.",
            "position",
        )
        self._histograms = {
            k: self._new(Histogram, n, h, buckets=b)
            for k, (n, h, b) in (_HISTOGRAMS | _STEPS).items()
        }
        self._older = {
            key: self._new(Histogram, name, _HISTOGRAMS[key][1], buckets=_HISTOGRAMS[key][2])
            for key, name in _OLDER_NAMES.items()
            if is_vllm
        }
        self._requests = [
            (
                one.value,
                self._new(Histogram, one.name, one.help, buckets=one.buckets).labels(model_name),
            )
            for one in _REQUESTS
        ]

    def _new(
        self, kind: type[Kind], name: str, about: str, *labels: str, **options: Sequence[float]
    ) -> Kind:
        """A metric with labels beside the model's name."""
        shown = ["model_name", *labels]
        return kind(f"{self._prefix}:{name}", about, shown, registry=self.registry, **options)  # type: ignore[arg-type]

    def _add_constants(self, cache: Mapping[str, str], adapters: bool) -> None:
        """Add what never changes: gauges of value 1 whose labels tell it."""
        if cache:
            told = "Sizes and settings of the cache."
            labels = {"model_name": self._model, "engine": "0", **cache}
            self._new(Gauge, "cache_config_info", told, *list(labels)[1:]).labels(**labels).set(1)
        if adapters:
            none = {"running_lora_adapters": "", "waiting_lora_adapters": "", "max_lora": "0"}
            info = self._new(Gauge, "lora_requests_info", "Adapters: there are none.", *none)
            info.labels(model_name=self._model, **none).set(1)

    def observe(self, record: Record) -> None:
        """Counts a request that has ended."""
        for value_of, histogram in self._requests:
            value = value_of(record)
            if value is not None:
                histogram.observe(value)

    def render(self, stats: Stats) -> bytes:
        """Return the text for one scrape."""
        self.read(stats)
        return generate_latest(self.registry)

    def read(self, stats: Stats) -> Stats:
        """Count what the engine has told since it was last read; returns the same stats.

        Whoever takes stats from the engine passes them through here: their histogram lists start
        anew with every reading.
        """
        for key, gauge in self._gauges.items():
            gauge.labels(self._model).set(getattr(stats, key))
        for usage in self._usages:
            usage.labels(self._model).set(stats.pages_used / max(stats.pages, 1))
        for key, counter in self._counters.items():
            counter.labels(self._model).inc(self._grown(key, getattr(stats, key)))
        self._host_usage.labels(self._model).set(stats.host_pages_used / max(stats.host_pages, 1))
        for way, keys in _TRANSFERS.items():
            for counter, key in zip(self._transfers, keys, strict=True):
                counter.labels(self._model, way).inc(self._grown(key, getattr(stats, key)))
        for reason, total in stats.requests_success_total.items():
            grown = self._grown(f"success {reason}", total)
            self._success.labels(self._model, reason).inc(grown)
        for place, total in enumerate(stats.accepted_at):
            grown = self._grown(f"accepted at {place}", total)
            self._accepted_at.labels(self._model, str(place)).inc(grown)
        for key in _HISTOGRAMS:
            for seconds in getattr(stats, key):
                self._observe(key, seconds)
        for step in stats.decode_steps:
            self._observe_step(step)
        return stats

    def _observe_step(self, step: DecodeStep) -> None:
        self._observe("seconds", step.seconds)
        if self.floors is not None:
            floor = self.floors.seconds(step.rows, step.drafts, step.context)
            self._floor.labels(self._model).inc(floor)
            self._observe("over_floor", step.seconds / floor)

    def _observe(self, key: str, value: float) -> None:
        self._histograms[key].labels(self._model).observe(value)
        if key in self._older:
            self._older[key].labels(self._model).observe(value)

    def _grown(self, key: str, total: float) -> float:
        before = self._seen.get(key, 0)
        self._seen[key] = total
        return max(total - before, 0)
