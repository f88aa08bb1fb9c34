"""The engine's counters in Prometheus' text format, with vLLM's names and a selectable prefix."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lockstep.config import EngineConfig, Plan
from lockstep.engine.stats import DecodeStep, Stats
from lockstep.kernels.selection import Replacement
from lockstep.serve.telemetry.request_record import RequestRecord
from lockstep.worker.roofline import StepFloors

_GAUGES = {
    "num_running": ("num_requests_running", "Requests that are running."),
    "num_waiting": ("num_requests_waiting", "Requests that wait."),
    "num_swapped": ("num_requests_swapped", "Requests that wait in host memory."),
    "num_audits_pending": ("audits_pending", "Ended requests that will run again."),
    "num_audit_records": (
        "audit_records",
        "Files about audits that found a difference, also before this start; it should stay 0.",
    ),
}
_COUNTERS = {
    "prompt_tokens_total": ("prompt_tokens", "Prompt tokens received."),
    "generation_tokens_total": ("generation_tokens", "Tokens generated."),
    "drafts_total": ("spec_decode_num_drafts", "Rows of steps that verified drafts."),
    "draft_tokens_total": ("spec_decode_num_draft_tokens", "Tokens drafted."),
    "accepted_tokens_total": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "steps_total": ("decode_steps", "Decode steps launched."),
    "preemptions_total": ("num_preemptions", "Requests moved to host memory."),
    "restarts_total": (
        "engine_restarts",
        "Engine processes that ended unexpectedly and were restarted.",
    ),
    "resumed_total": (
        "requests_resumed",
        "Requests that went on after the engine failed while it ran them.",
    ),
    "audited_requests_total": ("audited_requests", "Ended requests that ran again."),
    "audit_differences_total": (
        "audit_differences",
        "Audited requests whose second answer differed; it should stay 0.",
    ),
    "audits_dropped_total": (
        "audits_dropped",
        "Requests that were chosen for an audit and did not run again.",
    ),
    "kv_event_batches_total": ("kv_event_batches", "Batches of KV events that were published."),
    "kv_event_batches_dropped_total": (
        "kv_event_batches_dropped",
        "Batches of KV events that were dropped, since too many waited for the publisher.",
    ),
    "prefix_hits_total": ("prefix_cache_hits", "Prompt tokens that were prefix cache hits."),
    "prefix_queries_total": (
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    "host_hits_total": (
        "external_prefix_cache_hits",
        "Prompt tokens that were prefix cache hits in host memory.",
    ),
    "host_queries_total": (
        "external_prefix_cache_queries",
        "Prompt tokens that were looked up in host memory.",
    ),
}
_TRANSFERS = {
    "GPU_to_CPU": ("offloaded_total", "offloaded_bytes_total"),
    "CPU_to_GPU": ("fetched_total", "fetched_bytes_total"),
}
"""transfer_type -> counters of transfers and of their bytes."""
_TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_COUNT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_TOKEN_BUCKETS = (1.0, *(float(8 << power) for power in range(12)))
_LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_HISTOGRAMS = {
    "ttft_seconds": ("time_to_first_token_seconds", "Arrival to first token.", _LONG_SECONDS),
    "itl_seconds": (
        "inter_token_latency_seconds",
        "Between two updates of a request.",
        _SHORT_SECONDS,
    ),
    "e2e_seconds": ("e2e_request_latency_seconds", "Arrival to last token.", _LONG_SECONDS),
    "iteration_tokens": (
        "iteration_tokens_total",
        "Prompt tokens and generated tokens of a step.",
        _STEP_TOKEN_BUCKETS,
    ),
}
_FORMER_NAMES = {"itl_seconds": "time_per_output_token_seconds"}
"""vLLM's former names of histograms, which dashboards still read."""
_FORMER_COUNTERS = {
    "prefix_hits_total": "gpu_prefix_cache_hits",
    "prefix_queries_total": "gpu_prefix_cache_queries",
}
"""vLLM's former names of counters, which gateways still read."""
_SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
"""Sleep state of an engine -> whether it has it. Engines never sleep."""
_RATIO_BUCKETS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0)
_STEPS = {
    "seconds": (
        "decode_step_seconds",
        "Duration of a decode step without prompts, measured by the device.",
        _SHORT_SECONDS,
    ),
    "over_floor": (
        "decode_step_over_floor",
        "Duration of a decode step relative to its roofline time.",
        _RATIO_BUCKETS,
    ),
}


class _RequestHistogram(NamedTuple):
    """A histogram over requests that have ended. value: returns None where it is not known."""

    name: str
    help: str
    buckets: tuple[float, ...]
    value: Callable[[RequestRecord], float | None]


def _per_token(record: RequestRecord) -> float | None:
    """Return the mean seconds between two tokens of the longest completion."""
    seconds = record.latencies.get("decode")
    return (
        None
        if seconds is None or record.max_completion_tokens < 2
        else seconds / (record.max_completion_tokens - 1)
    )


_REQUEST_HISTOGRAMS = (
    _RequestHistogram(
        "request_prompt_tokens",
        "Prompt tokens of a request.",
        _TOKEN_BUCKETS,
        lambda r: r.prompt_tokens,
    ),
    _RequestHistogram(
        "request_generation_tokens",
        "Tokens generated for a request.",
        _TOKEN_BUCKETS,
        lambda r: r.completion_tokens,
    ),
    _RequestHistogram(
        "request_max_num_generation_tokens",
        "Tokens of a request's longest completion.",
        _TOKEN_BUCKETS,
        lambda r: r.max_completion_tokens,
    ),
    _RequestHistogram(
        "request_params_max_tokens",
        "max_tokens of a request.",
        _TOKEN_BUCKETS,
        lambda r: r.params.max_tokens,
    ),
    _RequestHistogram("request_params_n", "n of a request.", _COUNT_BUCKETS, lambda r: r.params.n),
    _RequestHistogram(
        "request_queue_time_seconds",
        "Arrival to a row in the batch.",
        _LONG_SECONDS,
        lambda r: r.latencies.get("queue"),
    ),
    _RequestHistogram(
        "request_prefill_time_seconds",
        "A row in the batch to the first token.",
        _LONG_SECONDS,
        lambda r: r.latencies.get("prefill"),
    ),
    _RequestHistogram(
        "request_decode_time_seconds",
        "First token to last token.",
        _LONG_SECONDS,
        lambda r: r.latencies.get("decode"),
    ),
    _RequestHistogram(
        "request_inference_time_seconds",
        "A row in the batch to the last token.",
        _LONG_SECONDS,
        lambda r: r.latencies.get("inference"),
    ),
    _RequestHistogram(
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request.",
        _SHORT_SECONDS,
        _per_token,
    ),
)

Kind = TypeVar("Kind", Gauge, Counter, Histogram)
Prefix = Literal["lockstep", "vllm"]
"""Prefix of the names."""


def cache_config(config: EngineConfig, plan: Plan) -> dict[str, str]:
    """Return the settings of a cache that gateways and dashboards read, with vLLM's names."""
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
    """Metrics in Prometheus' text format. Every metric has the model's name as a label.

    floors: roofline times of the engine's steps; None where they are not known.
    cache: settings of the cache: see cache_config(). adapters: names of the LoRA adapters.
    """

    def __init__(
        self,
        model_name: str,
        prefix: Prefix = "lockstep",
        floors: StepFloors | None = None,
        cache: Mapping[str, str] | None = None,
        adapters: Collection[str] = (),
    ) -> None:
        self.floors = floors
        self.registry = CollectorRegistry()
        self._model = model_name
        self._prefix = prefix
        is_vllm = prefix == "vllm"  # gateways and dashboards read former names and constants, too
        self._previous: dict[str, float] = {}
        self._gauges = {k: self._new(Gauge, n, h) for k, (n, h) in _GAUGES.items()}
        rate = self._new(
            Gauge,
            "memory_bytes_per_second",
            "Memory bandwidth for roofline times; 0 where it is not known.",
        )
        rate.labels(model_name).set(floors.rates.memory if floors else 0)
        former_usages = ("gpu_cache_usage_perc",) if is_vllm else ()
        self._usages = [
            self._new(Gauge, name, "Used fraction of pages.")
            for name in ("kv_cache_usage_perc", *former_usages)
        ]
        self._add_cache_info(cache or {})
        if is_vllm:
            self._add_vllm_constants(adapters)
        self._counters = {k: self._new(Counter, n, h) for k, (n, h) in _COUNTERS.items()}
        self._former_counters = self._new_former_counters() if is_vllm else {}
        self._hit_rates = [
            self._new(Gauge, name, "Fraction of prompt tokens that were prefix cache hits.")
            for name in (("gpu_prefix_cache_hit_rate",) if is_vllm else ())
        ]
        self._floor = self._new(
            Counter, "decode_step_floor_seconds", "Roofline time of the decode steps."
        )
        self._transfers = self._transfer_counters()
        former_host_usages = ("cpu_cache_usage_perc",) if is_vllm else ()
        self._host_usages = [
            self._new(Gauge, name, "Used fraction of the cache in host memory.")
            for name in ("kv_offload_cpu_cache_usage_perc", *former_host_usages)
        ]
        self._success = self._new(
            Counter, "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._accepted_at = self._new(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position, from 0.",
            "position",
        )
        self._histograms = {
            k: self._new(Histogram, n, h, buckets=b)
            for k, (n, h, b) in (_HISTOGRAMS | _STEPS).items()
        }
        self._former = {
            key: self._new(Histogram, name, _HISTOGRAMS[key][1], buckets=_HISTOGRAMS[key][2])
            for key, name in _FORMER_NAMES.items()
            if is_vllm
        }
        self._request_histograms = [
            self._request_histogram(histogram) for histogram in _REQUEST_HISTOGRAMS
        ]

    def _new_former_counters(self) -> dict[str, Counter]:
        """Return the counters under vLLM's former names."""
        return {
            key: self._new(Counter, name, _COUNTERS[key][1])
            for key, name in _FORMER_COUNTERS.items()
        }

    def _transfer_counters(self) -> list[Counter]:
        """Return the counters of transfers to and from host memory: units, and bytes."""
        direction = "copied to host memory and back."
        return [
            self._new(Counter, f"kv_offload_total_{name}", f"{what} {direction}", "transfer_type")
            for name, what in (
                ("units", "Pages and snapshots"),
                ("bytes", "Bytes of pages and snapshots"),
            )
        ]

    def _request_histogram(
        self, histogram: _RequestHistogram
    ) -> tuple[Callable[[RequestRecord], float | None], Histogram]:
        """Return the value of a record, and the metric that counts it."""
        metric = self._new(Histogram, histogram.name, histogram.help, buckets=histogram.buckets)
        return histogram.value, metric.labels(self._model)

    def _new(
        self,
        kind: type[Kind],
        name: str,
        description: str,
        *labels: str,
        **options: Sequence[float],
    ) -> Kind:
        """Return a new metric with these labels besides the model's name."""
        all_labels = ["model_name", *labels]
        full_name = f"{self._prefix}:{name}"
        return kind(full_name, description, all_labels, registry=self.registry, **options)  # type: ignore[arg-type]

    def _add_cache_info(self, cache: Mapping[str, str]) -> None:
        """Add a gauge of value 1 whose labels are the settings of the cache."""
        if cache:
            description = "Sizes and settings of the cache."
            labels = {"model_name": self._model, "engine": "0", **cache}
            self._new(Gauge, "cache_config_info", description, *list(labels)[1:]).labels(
                **labels
            ).set(1)

    def _add_vllm_constants(self, adapters: Collection[str]) -> None:
        """Add gauges that gateways read of vLLM and that never change here.

        Gateways take running_lora_adapters for the adapters that a server has loaded. All of them
        are, from the start, so that a gateway may send their requests anywhere.
        """
        labels = {
            "running_lora_adapters": ",".join(adapters),
            "waiting_lora_adapters": "",
            "max_lora": str(len(adapters)),
        }
        info = self._new(Gauge, "lora_requests_info", "LoRA adapters that are loaded.", *labels)
        # Gateways that read several series take the one of the latest time.
        info.labels(model_name=self._model, **labels).set(time.time())
        state = self._new(Gauge, "engine_sleep_state", "1 for awake.", "sleep_state")
        for name, value in _SLEEP_STATES.items():
            state.labels(self._model, name).set(value)

    def add_replacements(self, replacements: Sequence[Replacement]) -> None:
        """Add the replaced kernels, and what each costs where that was measured."""
        labels = ("op", "replaced", "backend")
        description = "Kernel backends that doctor found sick, with their replacements."
        replaced = self._new(Gauge, "kernel_replaced_info", description, *labels)
        description = "Time of a replacement relative to the replaced kernel backend."
        slowdown = self._new(Gauge, "kernel_replacement_slowdown", description, *labels)
        for replacement in replacements:
            values = (self._model, replacement.op, replacement.replaced, replacement.backend)
            replaced.labels(*values).set(1)
            if replacement.slowdown is not None:
                slowdown.labels(*values).set(replacement.slowdown)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        for value_of, histogram in self._request_histograms:
            value = value_of(record)
            if value is not None:
                histogram.observe(value)

    def render(self, stats: Stats) -> bytes:
        """Return the text of /metrics."""
        self.read(stats)
        return generate_latest(self.registry)

    def read(self, stats: Stats) -> Stats:
        """Count the changes since the last reading, and return the same stats.

        All stats must pass through here, since reading them empties the engine's histogram lists.
        """
        self._set_gauges(stats)
        for key, counter in self._counters.items():
            increase = self._increase(key, getattr(stats, key))
            counter.labels(self._model).inc(increase)
            if key in self._former_counters:
                self._former_counters[key].labels(self._model).inc(increase)
        for transfer_type, keys in _TRANSFERS.items():
            for counter, key in zip(self._transfers, keys, strict=True):
                counter.labels(self._model, transfer_type).inc(
                    self._increase(key, getattr(stats, key))
                )
        for reason, total in stats.requests_success_total.items():
            increase = self._increase(f"success {reason}", total)
            self._success.labels(self._model, reason).inc(increase)
        for position, total in enumerate(stats.accepted_at):
            increase = self._increase(f"accepted at {position}", total)
            self._accepted_at.labels(self._model, str(position)).inc(increase)
        for key in _HISTOGRAMS:
            for seconds in getattr(stats, key):
                self._observe(key, seconds)
        for step in stats.decode_steps:
            self._observe_step(step)
        return stats

    def _set_gauges(self, stats: Stats) -> None:
        for key, gauge in self._gauges.items():
            gauge.labels(self._model).set(getattr(stats, key))
        for gauges, part, total in (
            (self._usages, stats.pages_used, stats.pages),
            (self._hit_rates, stats.prefix_hits_total, stats.prefix_queries_total),
            (self._host_usages, stats.host_pages_used, stats.host_pages),
        ):
            for gauge in gauges:
                gauge.labels(self._model).set(part / max(total, 1))

    def _observe_step(self, step: DecodeStep) -> None:
        self._observe("seconds", step.seconds)
        if self.floors is not None:
            floor = self.floors.seconds(step.rows, step.drafts, step.context)
            self._floor.labels(self._model).inc(floor)
            self._observe("over_floor", step.seconds / floor)

    def _observe(self, key: str, value: float) -> None:
        self._histograms[key].labels(self._model).observe(value)
        # Dashboards for older vLLM read the same values under the former name.
        if key in self._former:
            self._former[key].labels(self._model).observe(value)

    def _increase(self, key: str, total: float) -> float:
        # A restarted engine counts from 0 again; Prometheus counters must not fall.
        previous = self._previous.get(key, 0)
        self._previous[key] = total
        return max(total - previous, 0)
