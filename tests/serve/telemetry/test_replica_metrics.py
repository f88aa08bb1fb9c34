"""Metrics with the label `replica`."""

from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from lockstep.engine.stats import Stats
from lockstep.serve.telemetry.metrics import Metrics
from lockstep.serve.telemetry.replica_metrics import ReplicaCollector


class Source:
    """Two replicas, of which one may have gone."""

    def __init__(self) -> None:
        self.moved_total: Mapping[str, int] = Counter({"lost": 3})
        self.stats = {
            "a": ("ls-1", Stats(num_running=2, pages_used=5, pages=20, prompt_tokens_total=70)),
            "b": ("ls-1", Stats(num_running=1, pages_used=0, pages=20, prompt_tokens_total=30)),
        }

    def replica_stats(self) -> Mapping[str, tuple[str, Stats]]:
        return self.stats

    def restart_replicas(self) -> None:
        """Do nothing."""


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the values of all samples by (name, replica or reason)."""
    text = metrics.render(Stats()).decode()
    return {
        (sample.name, sample.labels.get("replica") or sample.labels.get("reason") or ""): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_present_replicas_are_exported_next_to_their_sums() -> None:
    source = Source()
    metrics = Metrics("model", "vllm")
    metrics.registry.register(ReplicaCollector("model", "vllm", source))
    values = samples(metrics)
    assert values["vllm:replica_num_requests_running", "a"] == 2
    assert values["vllm:replica_kv_cache_usage_perc", "a"] == 0.25
    assert values["vllm:replica_prompt_tokens_total", "b"] == 30
    assert values["vllm:replica_info", "b"] == 1
    assert values["vllm:requests_moved_total", "lost"] == 3
    assert values["vllm:requests_moved_total", "drained"] == 0
    assert values["vllm:num_requests_running", ""] == 0, "the sum has no label"
    del source.stats["a"]
    assert {who for name, who in samples(metrics) if "replica_" in name} == {"b"}
