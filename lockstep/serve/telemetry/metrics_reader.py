"""A running server's figures, from two readings of its /metrics."""

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

MOST_BYTES = 4 << 20
"""Of an answer of /metrics; ours has some 20 KB."""
PATIENCE = 5.0
"""Seconds that a server may take to answer."""
_RUNNING = re.compile(r"(\w+):num_requests_running")


@dataclass(frozen=True)
class Reading:
    """What /metrics told. at: seconds of time.monotonic.

    values: by name without what stands in front, summed over labels but for those below;
    accepted_at: accepted drafts by place; ended: requests by the reason of their end.
    """

    at: float
    model: str
    values: Mapping[str, float]
    accepted_at: tuple[float, ...] = ()
    ended: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Period:
    """Figures of a time; None where nothing happened that they could be made of.

    Speeds are tokens a second, times milliseconds, shares 0 to 1. acceptance_length: tokens of a
    row's step that brought drafts; accepted_at: by place, the share of such steps that accepted it.
    floor_ms: the least time that the steps could take; over_floor: the time that they took over it.
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
    """A server's state: gauges, what has ended, and the figures of now and since its start."""

    model: str
    running: int
    waiting: int
    swapped: int
    cache_usage: float
    ended: dict[str, int]
    now: Period
    since_start: Period


def server_address(url: str) -> str:
    """Return a server's URL as users write it, without /v1 at its end. Raises ConfigError."""
    address = url if "//" in url else f"http://{url}"
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(
            f"url={brief(url)} is not allowed; allowed: http://HOST:PORT or https. Name the "
            "server's address."
        )
    return address.rstrip("/").removesuffix("/v1")


class Source:
    """A server's /metrics. Raises ConfigError for what is no address of one, or no answer of one.

    key: sent where the server wants one.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = f"{server_address(url)}/metrics"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Without proxies: what is watched is a machine of one's own.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> Reading:
        """One reading. Raises ConfigError."""
        request = urllib.request.Request(self.url, headers=self._headers)
        try:
            with self._opener.open(request, timeout=PATIENCE) as answer:
                text = answer.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            remedy = (
                "Send its key with --api-key" if error.code == 401 else "Name a server's address"
            )
            raise self._error(f"it answered {error.code}", remedy) from None
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise self._error(str(why), "Is the server running there") from None
        if len(text) > MOST_BYTES:
            raise self._error(f"its answer is larger than {MOST_BYTES >> 20} MiB", "Is it Lockstep")
        found = parse(text.decode("utf-8", "replace"), time.monotonic())
        if found is None:
            raise self._error("its answer has no num_requests_running", "Is it Lockstep")
        return found

    def _error(self, why: str, remedy: str) -> ConfigError:
        return ConfigError(f"url={brief(self.url)} cannot be watched: {why}. {remedy}?")


def parse(text: str, at: float) -> Reading | None:
    """The reading that a text of /metrics is, under either of its names; None if it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    named = _RUNNING.search(text)
    if named is None:
        return None
    front = f"{named[1]}:"
    model = ""
    values: dict[str, float] = defaultdict(float)
    places: dict[int, float] = defaultdict(float)
    ended: dict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not isfinite(sample.value):
                    return None
                name = sample.name.removeprefix(front)
                labels = sample.labels
                model = labels.get("model_name", model)
                values[name] += sample.value
                if name == "request_success_total":
                    ended[labels["finished_reason"]] += sample.value
                elif name == "spec_decode_num_accepted_tokens_per_pos_total":
                    places[int(labels["position"])] += sample.value
    except (ValueError, KeyError, IndexError):
        return None
    by_place = tuple(places[place] for place in range(len(places)))
    return Reading(at, model, values, by_place, ended)


def frame(before: Reading, after: Reading) -> Frame:
    """The server's state at the later of two readings."""
    values = after.values
    return Frame(
        model=after.model,
        running=int(values["num_requests_running"]),
        waiting=int(values.get("num_requests_waiting", 0)),
        swapped=int(values.get("num_requests_swapped", 0)),
        cache_usage=values.get("kv_cache_usage_perc", 0.0),
        ended={reason: int(count) for reason, count in sorted(after.ended.items()) if count},
        now=_period(before, after, after.at - before.at),
        since_start=_period(Reading(0.0, "", {}), after, None),
    )


def _period(before: Reading, after: Reading, seconds: float | None) -> Period:
    """seconds: None where it is not known how long the time was."""

    def grown(name: str) -> float:
        return _growth(before.values.get(name, 0.0), after.values.get(name, 0.0))

    def mean_ms(name: str) -> float | None:
        ms = _share(grown(f"{name}_sum"), grown(f"{name}_count"))
        return None if ms is None else 1e3 * ms

    drafts = grown("spec_decode_num_drafts_total")
    accepted = grown("spec_decode_num_accepted_tokens_total")
    per_step = _share(accepted, drafts)
    steps = grown("decode_step_seconds_count")
    floor = grown("decode_step_floor_seconds_total")
    earlier = before.accepted_at or (0.0,) * len(after.accepted_at)
    places = [_growth(*pair) for pair in zip(earlier, after.accepted_at, strict=False)]
    return Period(
        seconds=seconds,
        generation_speed=_share(grown("generation_tokens_total"), seconds),
        prompt_speed=_share(grown("prompt_tokens_total"), seconds),
        acceptance_length=None if per_step is None else 1 + per_step,
        acceptance_rate=_share(accepted, grown("spec_decode_num_draft_tokens_total")),
        accepted_at=tuple(count / drafts for count in places) if drafts else (),
        step_ms=mean_ms("decode_step_seconds"),
        floor_ms=1e3 * floor / steps if floor and steps else None,
        over_floor=_share(grown("decode_step_seconds_sum"), floor),
        first_token_ms=mean_ms("time_to_first_token_seconds"),
        next_token_ms=mean_ms("inter_token_latency_seconds"),
        prefix_hits=_share(grown("prefix_cache_hits_total"), grown("prefix_cache_queries_total")),
        preemptions=int(grown("num_preemptions_total")),
    )


def _growth(before: float, after: float) -> float:
    """What a counter has counted; one that fell began anew, with its server."""
    return after - before if after >= before else after


def _share(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None
