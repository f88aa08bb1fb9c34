"""Reader of a running server's /metrics: figures of the time between two readings."""

import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from math import isfinite
from urllib.parse import urlsplit

from lockstep.errors import ConfigError, brief

MAX_BYTES = 4 << 20
"""Maximum size of /metrics. This server sends about 20 KB."""
TIMEOUT_SECONDS = 5.0
_RUNNING = re.compile(r"(\w+):num_requests_running")


@dataclass(frozen=True)
class Reading:
    """Content of /metrics.

    time: seconds of time.monotonic().
    values: by name without prefix, summed over labels.
    accepted_at: accepted draft tokens by position.
    ended: number of requests that have ended, by finish reason.
    """

    time: float
    model: str
    values: Mapping[str, float]
    accepted_at: tuple[float, ...] = ()
    ended: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Period:
    """Figures of a period; None where nothing was measured.

    Speeds are in tokens per second, times in milliseconds, rates from 0 to 1.
    acceptance_length: mean tokens per row and step with drafts.
    accepted_at: acceptance rate by draft position.
    step_ms: mean time of a decode step. floor_ms: its roofline time. over_floor: their ratio.
    first_token_ms, next_token_ms: mean time to the first token, and between tokens.
    prefix_hits: share of prompt tokens that were cached.
    """

    seconds: float | None
    generation_speed: float | None
    prompt_speed: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    accepted_at: tuple[float, ...]
    step_ms: float | None
    floor_ms: float | None
    over_floor: float | None
    first_token_ms: float | None
    next_token_ms: float | None
    prefix_hits: float | None
    preemptions: int


@dataclass(frozen=True)
class Frame:
    """State of a server: gauges, ended requests, and figures of the last period and since start."""

    model: str
    running: int
    waiting: int
    swapped: int
    cache_usage: float
    ended: dict[str, int]
    now: Period
    since_start: Period


def server_address(url: str) -> str:
    """Return the base URL of a server, without /v1 at its end. Raises ConfigError.

    url: as a user writes it; the scheme may be missing.
    """
    address = url if "//" in url else f"http://{url}"
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"url={brief(url)} is not allowed; allowed: http://HOST:PORT or https. Name the "
            "server's address."
        )
    return address.rstrip("/").removesuffix("/v1")


class MetricsReader:
    """Reader of a server's /metrics.

    key: API key, if the server needs one. Raises ConfigError for an invalid URL.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = f"{server_address(url)}/metrics"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Without proxies, since the server usually runs on a machine of the local network.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> Reading:
        """Return a reading. Raises ConfigError if the server cannot be read."""
        request = urllib.request.Request(self.url, headers=self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                text = answer.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            remedy = (
                "Send its key with --api-key" if error.code == 401 else "Name a server's address"
            )
            raise self._error(f"it answered {error.code}", remedy) from None
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise self._error(str(why), "Is the server running there") from None
        if len(text) > MAX_BYTES:
            raise self._error(f"its answer is larger than {MAX_BYTES >> 20} MiB", "Is it Lockstep")
        reading = parse(text.decode("utf-8", "replace"), time.monotonic())
        if reading is None:
            raise self._error("its answer has no num_requests_running", "Is it Lockstep")
        return reading

    def _error(self, reason: str, remedy: str) -> ConfigError:
        return ConfigError(f"url={brief(self.url)} cannot be watched: {reason}. {remedy}?")


def parse(text: str, read_time: float) -> Reading | None:
    """Parse the text of /metrics, with either prefix; return None if it has other metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    match = _RUNNING.search(text)
    if match is None:
        return None
    prefix = f"{match[1]}:"
    model = ""
    values: dict[str, float] = defaultdict(float)
    accepted: dict[int, float] = defaultdict(float)
    ended: dict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # No counter of this server is infinite: the text is of another server.
                if not isfinite(sample.value):
                    return None
                name = sample.name.removeprefix(prefix)
                labels = sample.labels
                model = labels.get("model_name", model)
                values[name] += sample.value
                if name == "request_success_total":
                    ended[labels["finished_reason"]] += sample.value
                elif name == "spec_decode_num_accepted_tokens_per_pos_total":
                    accepted[int(labels["position"])] += sample.value
    except (ValueError, KeyError, IndexError):
        return None
    accepted_at = tuple(accepted[position] for position in range(len(accepted)))
    return Reading(read_time, model, values, accepted_at, ended)


def frame(before: Reading, after: Reading) -> Frame:
    """Return the server's state at the later of two readings."""
    values = after.values
    return Frame(
        model=after.model,
        running=int(values["num_requests_running"]),
        waiting=int(values.get("num_requests_waiting", 0)),
        swapped=int(values.get("num_requests_swapped", 0)),
        cache_usage=values.get("kv_cache_usage_perc", 0.0),
        ended={reason: int(count) for reason, count in sorted(after.ended.items()) if count},
        now=_period(before, after, after.time - before.time),
        since_start=_period(Reading(0.0, "", {}), after, None),
    )


def _period(before: Reading, after: Reading, seconds: float | None) -> Period:
    """Return the figures between two readings. seconds: None where the duration is not known."""

    def increase(name: str) -> float:
        return _increase(before.values.get(name, 0.0), after.values.get(name, 0.0))

    def mean_ms(name: str) -> float | None:
        ms = _ratio(increase(f"{name}_sum"), increase(f"{name}_count"))
        return None if ms is None else 1e3 * ms

    drafts = increase("spec_decode_num_drafts_total")
    accepted = increase("spec_decode_num_accepted_tokens_total")
    per_step = _ratio(accepted, drafts)
    steps = increase("decode_step_seconds_count")
    floor = increase("decode_step_floor_seconds_total")
    earlier = before.accepted_at or (0.0,) * len(after.accepted_at)
    accepted_at = [_increase(*pair) for pair in zip(earlier, after.accepted_at, strict=False)]
    return Period(
        seconds=seconds,
        generation_speed=_ratio(increase("generation_tokens_total"), seconds),
        prompt_speed=_ratio(increase("prompt_tokens_total"), seconds),
        acceptance_length=None if per_step is None else 1 + per_step,
        acceptance_rate=_ratio(accepted, increase("spec_decode_num_draft_tokens_total")),
        accepted_at=tuple(count / drafts for count in accepted_at) if drafts else (),
        step_ms=mean_ms("decode_step_seconds"),
        floor_ms=1e3 * floor / steps if floor and steps else None,
        over_floor=_ratio(increase("decode_step_seconds_sum"), floor),
        first_token_ms=mean_ms("time_to_first_token_seconds"),
        next_token_ms=mean_ms("inter_token_latency_seconds"),
        prefix_hits=_ratio(
            increase("prefix_cache_hits_total"), increase("prefix_cache_queries_total")
        ),
        preemptions=int(increase("num_preemptions_total")),
    )


def _increase(before: float, after: float) -> float:
    """Return the increase of a counter; a counter that fell was reset by a restart."""
    return after - before if after >= before else after


def _ratio(numerator: float, denominator: float | None) -> float | None:
    return numerator / denominator if denominator else None
