"""A world: an engine, what is cached before, and requests that come and go, as plain data.

A world says everything that its run depends on besides the model, so that a file of it is enough to
run it again. Every answer in it must be the one that its request gets alone.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lockstep.check.drafters import NONE, hooks_of, speculative_config
from lockstep.errors import ConfigError, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.settings import why_unread
from lockstep.worker.hooks import CheckHooks

VERSION = 1
ROOM = 640
"""Tokens of prompt and answer that an engine of worlds has room for."""
MOST_PAGES = 64
MOST_SNAPSHOTS = 16
MOST_HOST = 16
MOST_REQUESTS = 64
MOST_BYTES = 1 << 24
"""Of a file of a world."""


@dataclass(frozen=True)
class Kind:
    """What an engine is built for; engines of one kind may be shared.

    drafter: none, a name in lockstep.spec.DRAFTERS, or that of AnswerOracle; changing: every step
    brings another number of drafts, up to `drafts`; lookup: the shortest n-gram that is looked up.
    """

    drafter: str = NONE
    drafts: int = 0
    changing: bool = False
    lookup: int = 1
    buckets: tuple[int, ...] = (1, 2, 4, 6)
    in_flight: int = 1
    graph: str = "none"

    def settings(self) -> dict[str, Any]:
        """The LLM arguments of an engine with room for every world of this kind."""
        spec = speculative_config(self.drafter, self.drafts, self.changing, self.lookup)
        return {
            "speculative_config": spec,
            "max_model_len": ROOM,
            "max_num_seqs": self.buckets[-1],
            "row_buckets": self.buckets,
            "steps_in_flight": self.in_flight,
            "cuda_graph_mode": self.graph,
            "num_gpu_blocks": MOST_PAGES + 1,
            "num_snapshots": MOST_SNAPSHOTS,
        }

    def hooks(self) -> CheckHooks:
        """What only a check puts into this engine."""
        return hooks_of(self.drafter, self.changing)


@dataclass(frozen=True)
class Limits:
    """What is scheduled and cached. rows: requests that run at once; chunk: prompt tokens of a
    step; pages, snapshots: how many there are; host: pages, and snapshots as well, that host memory
    has room for; preempt_every: as in CheckHooks; length: most tokens of prompt and answer."""

    rows: int = 6
    chunk: int = 2048
    pages: int = MOST_PAGES
    snapshots: int = MOST_SNAPSHOTS
    host: int = 0
    caching: bool = False
    preempt_every: int = 0
    policy: str = "fcfs"
    length: int = ROOM


@dataclass(frozen=True)
class WorldRequest:
    """One request. params: fields of SamplingParams that are not the default; arrival, abort,
    preempt: the steps at which it comes, is ended from outside, and is moved to the host;
    speculate: whether it wants drafts; salt: its cache_salt."""

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    arrival: int = 0
    abort: int | None = None
    preempt: tuple[int, ...] = ()
    priority: int = 0
    speculate: bool = True
    salt: str = ""

    def sampling(self) -> SamplingParams:
        """Its parameters as an object."""
        return SamplingParams(**self.params)


@dataclass(frozen=True)
class World:
    """primed: prompts that run before, one by one, so that they are cached; dirt: what all
    memory is filled with before, as a seed; draws: the seed of the numbers of drafts."""

    kind: Kind
    limits: Limits
    requests: tuple[WorldRequest, ...]
    primed: tuple[tuple[int, ...], ...] = ()
    dirt: int = 0
    draws: int = 0

    def alone(self, given: WorldRequest) -> SamplingParams:
        """A request's parameters in its plain run, whose engine has room for longer rows: what the
        length of this one ends, max_tokens ends there."""
        params = given.sampling()
        room = self.limits.length - len(given.prompt)
        if params.max_tokens is None or params.max_tokens <= room:
            return params
        return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))

    @property
    def drafting(self) -> str:
        """none, drafter K=n, or K=0..n where it changes."""
        kind = self.kind
        count = f"0..{kind.drafts}" if kind.changing else kind.drafts
        return f"{kind.drafter} K={count}" if kind.drafts else NONE

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> "World":
        """What to_json gave. Raises ConfigError where it is something else."""
        if not isinstance(data, dict) or data.get("version") != VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ConfigError(
                f"version={found!r} of a world is not allowed; allowed: {VERSION}. Write the file "
                "with this release of lockstep check."
            )
        try:
            world = cls(
                kind=Kind(**_as_tuples(data["kind"])),
                limits=Limits(**data["limits"]),
                requests=tuple(_request(r) for r in data["requests"]),
                primed=tuple(tuple(p) for p in data["primed"]),
                dirt=int(data["dirt"]),
                draws=int(data["draws"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the world cannot be read: {error!r}. Write it anew.") from None
        world.check()
        return world

    def check(self) -> None:
        """Raises ConfigError where an engine of its kind has no room for it."""
        limits = self.limits
        tokens = (*self.primed, *(request.prompt for request in self.requests))
        for name, value, low, high in (
            ("requests", len(self.requests), 1, MOST_REQUESTS),
            ("primed", len(self.primed), 0, MOST_REQUESTS),
            ("prompt", max((len(t) for t in tokens), default=1), 1, ROOM - 1),
            ("buckets", self.kind.buckets[-1], 1, MOST_REQUESTS),
            ("rows", limits.rows, 1, self.kind.buckets[-1]),
            ("chunk", limits.chunk, 64, 1 << 20),
            ("pages", limits.pages, 1, MOST_PAGES),
            ("snapshots", limits.snapshots, 0, MOST_SNAPSHOTS),
            ("host", limits.host, 0, MOST_HOST),
            ("preempt_every", limits.preempt_every, 0, 1 << 30),
            ("length", limits.length, 2, ROOM),
        ):
            if not (isinstance(value, int) and low <= value <= high):
                allowed = f"whole numbers from {low} to {high}"
                raise choice_error(ConfigError, name, value, allowed, "Mend the world.")


def _as_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _request(data: dict[str, Any]) -> WorldRequest:
    known = {f.name for f in fields(SamplingParams)}
    params = dict(data["params"])
    unknown = set(params) - known
    if unknown:
        raise ConfigError(f"params has {sorted(unknown)}; allowed: {', '.join(sorted(known))}.")
    if params.get("logit_bias"):
        params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
    return WorldRequest(**{**_as_tuples(data), "params": params})


def read_world(path: Path) -> World:
    """The world of a file. Raises ConfigError where there is none."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"it has {size} bytes, at most {MOST_BYTES} are allowed")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {why_unread(error)}. Name a file of a world."
        ) from None
    return World.from_json(data.get("world") if isinstance(data, dict) else data)


def write_world(path: Path, world: World, **about: Any) -> None:
    """A file of the world, and what is known about it, for people."""
    text = json.dumps({**about, "world": world.to_json()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
