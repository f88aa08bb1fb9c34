"""Messages between an engine's process and the server: plain data, pickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.cache.block_log import BlockEvent
from lockstep.engine.engine_loop import Delivery
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request


@dataclass(frozen=True)
class EngineRequest:
    """Request as plain data, with the fields of Request.

    seed, cache_salt, adapter, speculate, num_resumed, failures: see Request. grammar: the recipe of
    its grammar, None without one. params: without structured_outputs.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    metrics: RequestMetrics
    eos_token_ids: frozenset[int]
    seed: int
    cache_salt: str
    adapter: str
    speculate: bool
    num_resumed: int
    failures: int
    grammar: object

    @classmethod
    def of(cls, request: Request) -> "EngineRequest":
        """Return the plain data of a request."""
        return cls(
            request.id,
            request.prompt_token_ids,
            request.params.without_structured_outputs(),
            request.priority,
            request.metrics,
            request.eos_token_ids,
            request.seed,
            request.cache_salt,
            request.adapter,
            request.speculate,
            request.num_resumed,
            request.failures,
            None if request.grammar is None else request.grammar.recipe,
        )

    def request(self) -> Request:
        """Return the request, without its grammar."""
        return Request(
            id=self.id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            priority=self.priority,
            arrival=self.metrics.arrival_time,
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            speculate=self.speculate,
            num_resumed=self.num_resumed,
            failures=self.failures,
            metrics=self.metrics,
        )


@dataclass(frozen=True)
class Submit:
    """Command that queues requests; they are added between the same two steps."""

    requests: tuple[EngineRequest, ...]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Submit":
        """Return the message that queues requests."""
        return cls(tuple(map(EngineRequest.of, requests)))


_METRICS = TokenUpdate._fields.index("metrics")


@dataclass(frozen=True)
class Abort:
    """Command that aborts a request."""

    id: str


@dataclass(frozen=True)
class ResetPrefixCache:
    """Command that drops all cached prefixes."""


@dataclass(frozen=True)
class StopAudits:
    """Command that drops all audits from now on."""


@dataclass(frozen=True)
class Stop:
    """Command that ends the engine after its current step."""


Command = Submit | Abort | ResetPrefixCache | StopAudits | Stop


@dataclass(frozen=True)
class Progress:
    """Report of startup progress: `done` of `total` in the work `what`."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Failed:
    """Report that startup failed."""

    error: Exception


@dataclass(frozen=True)
class Ready:
    """Report that the engine serves. facts, rates: data of its executor, passed on unread."""

    facts: Any
    rates: Any


@dataclass(frozen=True)
class Began:
    """Report that the engine begins to work on requests: it compiles their grammars, or gives them
    rows.
    """

    ids: Sequence[str]


@dataclass(frozen=True)
class Idle:
    """Report that the engine has nothing to do: it waits for commands."""


@dataclass(frozen=True)
class Compiled:
    """Report that the grammars of requests are compiled: the requests wait for rows again."""

    ids: Sequence[str]


@dataclass(frozen=True)
class Updates:
    """Report of the updates of one step."""

    updates: Sequence[Delivery]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle plain tuples: an object of a class costs 5 us, and a step reports every row."""
        return _updates, ([(request_id, _plain(item)) for request_id, item in self.updates],)


def _plain(item: TokenUpdate | Exception) -> tuple[Any, ...] | Exception:
    """Return an update as a tuple of its fields, with its metrics as a tuple too."""
    if isinstance(item, Exception):
        return item
    return (*item[:_METRICS], tuple(vars(item.metrics).values()), *item[_METRICS + 1 :])


def _updates(updates: Sequence[tuple[str, tuple[Any, ...] | Exception]]) -> Updates:
    """Return the message that `Updates.__reduce__` wrote."""
    return Updates([(request_id, _item(data)) for request_id, data in updates])


def _item(data: tuple[Any, ...] | Exception) -> TokenUpdate | Exception:
    """Return the update of a tuple; the reverse of _plain()."""
    if isinstance(data, Exception):
        return data
    metrics = RequestMetrics(*data[_METRICS])
    return TokenUpdate._make((*data[:_METRICS], metrics, *data[_METRICS + 1 :]))


@dataclass(frozen=True)
class ChangedBlocks:
    """Report of the events of cached blocks since the last one."""

    events: Sequence[BlockEvent]


@dataclass(frozen=True)
class Heartbeat:
    """Report that the process lives. stalled_for: seconds since the current step began.

    The histogram lists of stats start anew with each.
    """

    stats: Stats
    stalled_for: float


@dataclass(frozen=True)
class Ended:
    """Report that the engine cannot go on."""

    why: str


Report = (
    Progress
    | Failed
    | Ready
    | Began
    | Idle
    | Compiled
    | Updates
    | ChangedBlocks
    | Heartbeat
    | Ended
)
