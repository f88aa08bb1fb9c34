"""Records of the journal: a request as it was accepted, the updates of its answer, and its end."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import Any, get_args

from lockstep.engine.token_update import TokenUpdate
from lockstep.outputs import ForcedMismatch, Logprob, RequestMetrics, TokenSource

Record = list[Any]
"""JSON array of a record; its first entry says what it is."""
REQUEST, UPDATE, END = "request", "update", "end"
_SOURCES: dict[str, TokenSource] = {source[0]: source for source in get_args(TokenSource)}
"""First letter of a source -> the source."""
_COUNTERS = ("num_draft_tokens", "num_accepted_tokens", "num_steps")
"""Metrics that change with every update; others are written where they change."""
_OTHER_METRICS = tuple(
    metric.name
    for metric in fields(RequestMetrics)
    if metric.name not in (*_COUNTERS, "arrival_time", "forced_mismatch")
)
_others_of = attrgetter(*_OTHER_METRICS)
_counters_of = attrgetter(*_COUNTERS)
_encode = json.JSONEncoder(separators=(",", ":")).encode
"""Encoder of records. json.dumps would make one for each record."""


@dataclass(frozen=True)
class SavedRequest:
    """Request of a client, with all that its answer depends on and no later process can compute.

    kind: name of the route's API. id: of the response. engine_id: beginning of the ids of the
    engine's requests. owner: salted hash of the client's API key, "" without keys. created,
    deadline: Unix times in seconds. prompts: token ids, since a template may print the date.
    seeds, max_tokens: of each completion. body: of the HTTP request, as text. conversation: earlier
    turns that the body refers to, as JSON. is_stream: the client reads events. keeps_running: the
    request goes on without a reader.
    """

    kind: str
    id: str
    engine_id: str
    owner: str
    created: int
    deadline: float | None
    arrival: float
    prompts: list[list[int]]
    seeds: list[int]
    max_tokens: list[int | None]
    body: str
    conversation: Any = None
    is_stream: bool = True
    keeps_running: bool = False

    def json(self) -> Any:
        """Return the value of the body."""
        return json.loads(self.body)

    def to_record(self) -> bytes:
        """Return the first record of a log."""
        return dumps([REQUEST, asdict(self)])


@dataclass(frozen=True)
class SavedEnd:
    """End of an answer. time: Unix time. error: (class, message) where an error ended it."""

    time: float
    error: tuple[str, str] | None = None

    def to_record(self) -> bytes:
        """Return the last record of a log."""
        return dumps([END, self.time, self.error])


@dataclass(frozen=True)
class SavedAnswer:
    """Request and what its client may have of the answer. end: None while it was not complete.

    updates: (number of the completion, update), in the order in which they were received.
    """

    request: SavedRequest
    updates: list[tuple[int, TokenUpdate]] = field(default_factory=list)
    end: SavedEnd | None = None


class UpdateEncoder:
    """Encoder of the updates of one request: metrics are written where they change.

    updates: those that are written already.
    """

    def __init__(self, updates: Sequence[tuple[int, TokenUpdate]] = ()) -> None:
        self._latest = {index: update.metrics for index, update in updates}

    def encode(self, index: int, update: TokenUpdate) -> bytes:
        """Return the record of the next update of a completion."""
        metrics = update.metrics
        before = self._latest.get(index) or RequestMetrics()
        self._latest[index] = metrics
        more: dict[str, Any] = {}
        values, old_values = _others_of(metrics), _others_of(before)
        if values != old_values:
            more["metrics"] = {
                name: value
                for name, value, old in zip(_OTHER_METRICS, values, old_values, strict=True)
                if value != old
            }
        if metrics.forced_mismatch is not None:
            more["mismatch"] = asdict(metrics.forced_mismatch)
        for name in ("finish_reason", "stop_reason", "error"):
            if (value := getattr(update, name)) is not None:
                more[name] = value
        for name in ("logprobs", "prompt_logprobs"):
            if (entries := getattr(update, name)) is not None:
                more[name] = [_plain(entry) for entry in entries]
        letters = "".join(source[0] for source in update.token_sources)
        record = [UPDATE, index, update.token_ids, letters, *_counters_of(metrics)]
        return dumps([*record, more] if more else record)


def _plain(entry: dict[int, Logprob] | None) -> list[Any] | None:
    if entry is None:
        return None
    return [[token_id, logprob.logprob, logprob.rank] for token_id, logprob in entry.items()]


def _entries(plain: Sequence[Any] | None) -> Any:
    """Return log-probabilities, None for none. Texts of tokens are decoded again by who shows
    them.
    """
    if plain is None:
        return None
    return [
        None
        if entry is None
        else {token_id: Logprob(value, rank) for token_id, value, rank in entry}
        for entry in plain
    ]


def _decode_update(
    record: Record, latest: dict[int, RequestMetrics], arrival: float
) -> tuple[int, TokenUpdate]:
    """Return an update of a record. latest: metrics of each completion so far; they are updated."""
    _, index, token_ids, letters, *rest = record
    more = rest[len(_COUNTERS)] if len(rest) > len(_COUNTERS) else {}
    metrics = latest[index].copy() if index in latest else RequestMetrics(arrival_time=arrival)
    for name, value in (*zip(_COUNTERS, rest, strict=False), *more.get("metrics", {}).items()):
        setattr(metrics, name, value)
    if "mismatch" in more:
        metrics.forced_mismatch = ForcedMismatch(**more["mismatch"])
    latest[index] = metrics
    update = TokenUpdate(
        token_ids,
        _entries(more.get("logprobs")),
        more.get("finish_reason"),
        more.get("stop_reason"),
        metrics.copy(),
        _entries(more.get("prompt_logprobs")),
        more.get("error"),
        tuple(_SOURCES[letter] for letter in letters),
    )
    return index, update


def decode(records: Sequence[bytes]) -> SavedAnswer:
    """Return the answer of a log. Raises ValueError, TypeError or KeyError for records that were
    not written by this release.
    """
    kind, fields_of_request = json.loads(records[0])
    if kind != REQUEST:
        raise ValueError(f"the first record is {kind!r}")
    request = SavedRequest(**fields_of_request)
    updates: list[tuple[int, TokenUpdate]] = []
    latest: dict[int, RequestMetrics] = {}
    for data in records[1:]:
        if (end := read_end(data)) is not None:
            return SavedAnswer(request, updates, end)
        updates.append(_decode_update(json.loads(data), latest, request.arrival))
    return SavedAnswer(request, updates)


def is_end(data: bytes) -> bool:
    """Return whether a record is the last one of a complete answer."""
    return data.startswith(b'["end"')


def read_end(data: bytes) -> SavedEnd | None:
    """Return the end that a record describes; None for another record."""
    if not is_end(data):
        return None
    _, time, error = json.loads(data)
    return SavedEnd(time, None if error is None else (error[0], error[1]))


def dumps(value: Any) -> bytes:
    """Return a value as JSON. Surrogates that a client sent are escaped."""
    return _encode(value).encode("ascii")
