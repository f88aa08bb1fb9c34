"""Scenario: an engine kind, cached prefixes and a schedule of requests, as plain data.

A scenario contains everything that its run depends on besides the model, so its file suffices to
run it again. Every request must get the output that it gets when it runs alone.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lockstep.check.companions import AS_SERVED, NUMERICS
from lockstep.check.drafters import ANSWERS_KEPT, NO_DRAFTER, hooks_of, speculative_config
from lockstep.check.engines import Conversation
from lockstep.check.judges.plain_runs import SERVED
from lockstep.check.scenarios.invariants import ANOTHER_ROW, AT_ONCE, LATER
from lockstep.engine.audit_record import AuditRecord
from lockstep.errors import ConfigError, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.settings import path_fault
from lockstep.worker.hooks import CheckHooks

VERSION = 7
"""Version of the file format; it changes with the fields of the classes below."""
MAX_MODEL_LEN = 640
"""max_model_len of the engines that run scenarios."""
PROMPT_BUCKETS = (64, 128, 256, 384)
"""Token counts to which some kinds of engines pad prompt steps."""
MAX_PAGES = 64
MAX_SNAPSHOTS = 16
MAX_HOST_PAGES = 16
MAX_REQUESTS = 64
NONE_WRONG = -1
"""Index of a wrong forced token where all are right."""
NEVER = ""
"""Phase of a request that is not preempted or aborted."""
WAITING = "waiting"
IN_PROMPT = "in the prompt"
AFTER_PROMPT = "after the prompt"
IN_ANSWER = "in the answer"
IN_FLIGHT = "in flight"
IN_HOST_MEMORY = "in host memory"
"""Phases of a request. In flight: a step is launched whose results are not read."""
PHASES = (WAITING, IN_PROMPT, AFTER_PROMPT, IN_ANSWER, IN_FLIGHT, IN_HOST_MEMORY)
RETURNS = (AT_ONCE, ANOTHER_ROW, LATER)
NO_FAILURE = "none"
BEFORE_STEP = "before a step"
AFTER_LAUNCH = "after a launch"
AT_RESULTS = "at the results"
"""Places where an engine raises once."""
FAILURES = (NO_FAILURE, BEFORE_STEP, AFTER_LAUNCH, AT_RESULTS)
MAX_BYTES = 1 << 28
"""Maximum size of a file to replay: log-probabilities of a long prompt take 1 KB a token."""


@dataclass(frozen=True)
class Kind:
    """Settings for which an engine is built; scenarios of one kind share an engine.

    drafter: "none", a name in lockstep.spec.DRAFTERS, or oracle_drafter.NAME. drafts: drafts per
    step. changing: the number of drafts varies per step, from 0 to `drafts`. lookup: minimum n-gram
    length. kept: tokens of ended answers that the suffix drafter keeps. in_flight: steps launched
    ahead. graph: graph mode. adapters: whether the engine has the LoRA adapters of the check.
    model: the served model or the name of a companion. numerics: a key of NUMERICS.
    """

    drafter: str = NO_DRAFTER
    drafts: int = 0
    changing: bool = False
    lookup: int = 1
    buckets: tuple[int, ...] = (1, 2, 4, 6)
    in_flight: int = 1
    graph: str = "none"
    adapters: bool = False
    model: str = SERVED
    numerics: str = AS_SERVED
    kept: int = ANSWERS_KEPT

    def settings(self) -> dict[str, Any]:
        """Return the LLM arguments of an engine that fits every scenario of this kind."""
        spec = speculative_config(self.drafter, self.drafts, self.changing, self.lookup, self.kept)
        return {
            "speculative_config": spec,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": self.buckets[-1],
            "row_buckets": self.buckets,
            # Where decode steps have padded rows, prompt steps have padding too.
            "prompt_buckets": None if self.buckets[0] == 1 else PROMPT_BUCKETS,
            "steps_in_flight": self.in_flight,
            "cuda_graph_mode": self.graph,
            "num_gpu_blocks": MAX_PAGES + 1,
            "num_snapshots": MAX_SNAPSHOTS,
        }

    def hooks(self) -> CheckHooks:
        """Return the hooks that a check adds to this engine."""
        return hooks_of(self.drafter, self.changing)


@dataclass(frozen=True)
class Limits:
    """Limits of scheduling and caching.

    rows: max_num_seqs. chunk: max_num_batched_tokens. pages, snapshots: sizes of the cache. host:
    number of pages, and of snapshots, in the host tier. caching: whether the prefix cache is on.
    preempt_every: see CheckHooks. policy: scheduling_policy. length: max_model_len. slab_pages:
    host pages per allocation, 0 for one allocation. failure: place where the engine raises once.
    failure_step: number of the step that raises.
    """

    rows: int = 6
    chunk: int = 2048
    pages: int = MAX_PAGES
    snapshots: int = MAX_SNAPSHOTS
    host: int = 0
    caching: bool = False
    preempt_every: int = 0
    policy: str = "fcfs"
    length: int = MAX_MODEL_LEN
    slab_pages: int = 0
    failure: str = NO_FAILURE
    failure_step: int = 0


@dataclass(frozen=True)
class WarmPrefix:
    """Prompt that runs before the requests of a scenario. tokens: length of its answer."""

    prompt: tuple[int, ...]
    tokens: int = 1
    salt: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class ScenarioRequest:
    """Request of a scenario.

    params: fields of SamplingParams that differ from the defaults. arrival: step at which it is
    added. abort: phase in which it is aborted, NEVER for none. preempt: phases in which it is
    preempted, in order. returns: how it returns then. again: a second request gets its id when it
    has ended. speculate: whether it may use drafts. salt: its cache_salt. adapter: name of its LoRA
    adapter, "" for the base model. forced: first tokens of its plain output that are forced; the
    output must still be the plain one. wrong: index of a forced token that another one replaces,
    NONE_WRONG for none. The output must end before it, or with `reports` go on with it.
    conversation: the messages that `prompt` is rendered from.
    """

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    arrival: int = 0
    abort: str = NEVER
    preempt: tuple[str, ...] = ()
    priority: int = 0
    speculate: bool = True
    salt: str = ""
    adapter: str = ""
    forced: int = 0
    wrong: int = NONE_WRONG
    reports: bool = False
    returns: str = AT_ONCE
    again: bool = False
    conversation: Conversation | None = None

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters."""
        return SamplingParams(**self.params)


@dataclass(frozen=True)
class Scenario:
    """Run of requests on one engine.

    warm_prefixes: prompts that are cached first, one after the other. poison_seed: seed of the
    random values that fill all memory beforehand. draws: seed of the random numbers of drafts per
    step.
    """

    kind: Kind
    limits: Limits
    requests: tuple[ScenarioRequest, ...]
    warm_prefixes: tuple[WarmPrefix, ...] = ()
    poison_seed: int = 0
    draws: int = 0

    def plain_params(self, request: ScenarioRequest) -> SamplingParams:
        """Return a request's parameters for its plain run.

        The plain engine has a larger max_model_len, so max_tokens ends the output where this
        scenario's length does.
        """
        params = request.sampling()
        max_tokens = self.limits.length - len(request.prompt)
        if params.max_tokens is None or params.max_tokens <= max_tokens:
            return params
        return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))

    def to_json(self) -> dict[str, Any]:
        """Return the scenario as plain data."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> "Scenario":
        """Return the scenario of to_json's data. Raises ConfigError if it is malformed."""
        if not isinstance(data, dict) or data.get("version") != VERSION:
            version = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ConfigError(
                f"version={version!r} of a scenario is not allowed; allowed: {VERSION}. Write the "
                "file with this release of lockstep check."
            )
        try:
            scenario = cls(
                kind=Kind(**_as_tuples(data["kind"])),
                limits=Limits(**data["limits"]),
                requests=tuple(_request(r) for r in data["requests"]),
                warm_prefixes=tuple(
                    WarmPrefix(**_as_tuples(prefix)) for prefix in data["warm_prefixes"]
                ),
                poison_seed=int(data["poison_seed"]),
                draws=int(data["draws"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the scenario is malformed: {error!r}. Name a file that lockstep check wrote."
            ) from None
        scenario.check()
        return scenario

    def check(self) -> None:
        """Raise ConfigError if an engine of its kind cannot run the scenario."""
        limits = self.limits
        warm = (prefix.prompt for prefix in self.warm_prefixes)
        tokens = (*warm, *(request.prompt for request in self.requests))
        for name, value, low, high in (
            ("requests", len(self.requests), 1, MAX_REQUESTS),
            ("warm_prefixes", len(self.warm_prefixes), 0, MAX_REQUESTS),
            ("prompt", max((len(t) for t in tokens), default=1), 1, MAX_MODEL_LEN - 1),
            ("buckets", self.kind.buckets[-1], 1, MAX_REQUESTS),
            ("rows", limits.rows, 1, self.kind.buckets[-1]),
            ("chunk", limits.chunk, 64, 1 << 20),
            ("pages", limits.pages, 1, MAX_PAGES),
            ("snapshots", limits.snapshots, 0, MAX_SNAPSHOTS),
            ("host", limits.host, 0, MAX_HOST_PAGES),
            ("preempt_every", limits.preempt_every, 0, 1 << 30),
            ("length", limits.length, 2, MAX_MODEL_LEN),
        ):
            if not (isinstance(value, int) and low <= value <= high):
                allowed = f"whole numbers from {low} to {high}"
                raise choice_error(ConfigError, name, value, allowed, "Correct the scenario.")
        phases = [phase for r in self.requests for phase in (*r.preempt, r.abort or WAITING)]
        for name, chosen, known in (
            ("failure", [limits.failure], FAILURES),
            ("preempt or abort", phases, PHASES),
            ("returns", [request.returns for request in self.requests], RETURNS),
            ("numerics", [self.kind.numerics], tuple(NUMERICS)),
        ):
            for text in chosen:
                if text not in known:
                    allowed = ", ".join(known)
                    raise choice_error(ConfigError, name, text, allowed, "Correct the scenario.")


def _as_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _request(data: dict[str, Any]) -> ScenarioRequest:
    known = {f.name for f in fields(SamplingParams)}
    params = dict(data["params"])
    unknown = set(params) - known
    if unknown:
        raise ConfigError(f"params has {sorted(unknown)}; allowed: {', '.join(sorted(known))}.")
    if params.get("logit_bias"):
        params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
    talk = data.get("conversation")
    conversation = None if talk is None else Conversation(**talk)
    return ScenarioRequest(**{**_as_tuples(data), "params": params, "conversation": conversation})


def read_replay(path: Path) -> Scenario | AuditRecord:
    """Return the scenario, or the audit, of a file. Raises ConfigError if it cannot be read."""
    data = _read(path)
    return AuditRecord.read(data) if "audit" in data else Scenario.from_json(data.get("scenario"))


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of a file. Raises ConfigError if it cannot be read."""
    return Scenario.from_json(_read(path).get("scenario"))


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises ConfigError if it cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, at most {MAX_BYTES} are allowed")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it has no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {path_fault(error)}. Name a file that lockstep check wrote."
        ) from None
    return data


def write_scenario(path: Path, scenario: Scenario, **about: Any) -> None:
    """Write a scenario to a file. about: facts for readers, such as what differed."""
    text = json.dumps({**about, "scenario": scenario.to_json()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
