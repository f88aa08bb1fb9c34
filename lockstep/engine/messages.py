"""What an engine's process and the server's tell each other: plain data, pickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.engine.engine_loop import Delivery
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request


@dataclass(frozen=True)
class EngineRequest:
    """A request as plain data. grammar: the recipe of its grammar, None without one."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    arrival: float
    eos_token_ids: frozenset[int]
    seed: int
    cache_salt: str
    speculate: bool
    grammar: object

    @classmethod
    def of(cls, request: Request) -> "EngineRequest":
        """Return the plain data of a request."""
        return cls(
            request.id,
            request.prompt_token_ids,
            request.params,
            request.priority,
            request.metrics.arrival_time,
            request.eos_token_ids,
            request.seed,
            request.cache_salt,
            request.speculate,
            None if request.grammar is None else request.grammar.recipe,
        )

    def request(self) -> Request:
        """Return the request, without its grammar."""
        return Request(
            id=self.id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            priority=self.priority,
            arrival=self.arrival,
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
            cache_salt=self.cache_salt,
            speculate=self.speculate,
        )


@dataclass(frozen=True)
class Submit:
    """Queues requests, which are added between the same two steps."""

    requests: tuple[EngineRequest, ...]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Submit":
        """Return the message that queues requests."""
        return cls(tuple(map(EngineRequest.of, requests)))


_METRICS = TokenUpdate._fields.index("metrics")


@dataclass(frozen=True)
class Abort:
    """Ends a request."""

    id: str


@dataclass(frozen=True)
class ResetPrefixCache:
    """Drops all cached prefixes."""


@dataclass(frozen=True)
class Stop:
    """Ends the engine after its present step."""


Command = Submit | Abort | ResetPrefixCache | Stop


@dataclass(frozen=True)
class Progress:
    """How far the start is: `done` of `of` in `what`."""

    what: str
    done: int
    of: int


@dataclass(frozen=True)
class Failed:
    """The start failed."""

    error: Exception


@dataclass(frozen=True)
class Ready:
    """The engine stands. rates: of its device, where they are known."""

    facts: Any
    rates: Any


@dataclass(frozen=True)
class Updates:
    """What a step brought to some of its requests."""

    news: Sequence[Delivery]

    def __reduce__(self) -> tuple[Any, ...]:
        """By plain values alone: pickle takes 5 us for an object of a class, and each step tells of
        every row."""
        return _updates, ([(request_id, _plain(item)) for request_id, item in self.news],)


def _plain(item: TokenUpdate | Exception) -> tuple[Any, ...] | Exception:
    """An update as its fields, with its metrics as theirs."""
    if isinstance(item, Exception):
        return item
    return (*item[:_METRICS], tuple(vars(item.metrics).values()), *item[_METRICS + 1 :])


def _updates(news: Sequence[tuple[str, tuple[Any, ...] | Exception]]) -> Updates:
    """The message of such values."""
    return Updates([(request_id, _item(told)) for request_id, told in news])


def _item(told: tuple[Any, ...] | Exception) -> TokenUpdate | Exception:
    """The reverse of _plain."""
    if isinstance(told, Exception):
        return told
    metrics = RequestMetrics(*told[_METRICS])
    return TokenUpdate._make((*told[:_METRICS], metrics, *told[_METRICS + 1 :]))


@dataclass(frozen=True)
class Pulse:
    """A sign of life. busy_for: seconds since the present step began. Histogram lists of stats
    start anew with each."""

    stats: Stats
    busy_for: float


@dataclass(frozen=True)
class Ended:
    """The engine cannot go on."""

    why: str


Report = Progress | Failed | Ready | Updates | Pulse | Ended
