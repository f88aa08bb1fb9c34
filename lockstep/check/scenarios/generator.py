"""Generate scenarios from the rows of a covering array, the same for the same seed and model.

Every request has a value of each feature (features.py). Prompts of a scenario come from a family of
texts that share pages. Parameters depend on the plain run's output, so that they take effect: a bad
word that begins with tokens of that output, or a stop token where min_tokens begins to allow it.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lockstep.check.companions import AS_SERVED, ATTENTION, MIXTURE, NUMERICS
from lockstep.check.drafters import ANSWERS_KEPT
from lockstep.check.judges.plain_runs import SERVED, PlainRuns, closing_tag
from lockstep.check.scenarios.covering import CoveringPlan
from lockstep.check.scenarios.features import (
    FAILURE,
    Event,
    FeatureTable,
    feature_table,
)
from lockstep.check.scenarios.invariants import AT_ONCE
from lockstep.check.scenarios.request_writer import SALT, Family, RequestWriter, WrittenRequest
from lockstep.check.scenarios.scenario import (
    IN_HOST_MEMORY,
    IN_PROMPT,
    MAX_HOST_PAGES,
    MAX_PAGES,
    NEVER,
    NO_FAILURE,
    Kind,
    Limits,
    Scenario,
    ScenarioRequest,
    WarmPrefix,
)
from lockstep.example_prompts import short_prompts
from lockstep.step import PAGE_SIZE

REQUESTS = 4
"""Requests of a scenario."""
PAGE = PAGE_SIZE
BUCKETS = {
    "every": ((1, 2, 3, 4, 5, 6), (1, 2, 4, 6)),
    "gaps": ((2, 6), (3, 5)),
    "one": ((6,),),
}
"""Row buckets of engines; with gaps, steps have padded rows."""
FEW_ANSWERS = (24, 61)
"""Tokens of ended answers that a small circular buffer keeps: it overflows in every scenario."""
HOST_PAGES = {"none": (0,), "one": (1,), "few": (2, 5), "many": (MAX_HOST_PAGES,)}
"""Pages, and snapshots, of the host tier."""
LAST_ARRIVAL = 16
"""Step before which twins arrive."""
TWIN_LOGPROBS = 1
"""Log-probabilities of the prompt of some twins, and of no other request."""
OTHER_SALT = 0.3
"""Share of the twins with another salt than their request."""
FILLER_PAGES = 8
"""Pages of a prompt that evicts others."""
GRAMMARS = {"structured_outputs", "thinking_token_budget"}
"""Parameters that make a grammar."""
Values = dict[str, str]
"""Value of each feature, by the feature's name."""


@dataclass(frozen=True)
class GeneratedScenario:
    """Scenario with the values that its requests were meant to have.

    values: of the requests. A value is missing where the parameters of the others do not permit it.
    """

    scenario: Scenario
    values: tuple[Values, ...]


class ScenarioGenerator:
    """Generator of numbered scenarios, the same for the same seed and model.

    drafters: names that the served checkpoint supports. graphs: graph modes of the device.
    strength: number of values of a covered tuple. companions: whether scenarios have companion
    models. numerics: formats of the companions. per_engine: consecutive scenarios that share an
    engine. num_requests: requests per scenario. num_ranks: tensor-parallel ranks of the engines.
    twins: share of the requests that come again without a disturbance.
    """

    def __init__(
        self,
        plain: PlainRuns,
        seed: int,
        drafters: tuple[str, ...],
        graphs: tuple[str, ...],
        strength: int = 2,
        companions: bool = False,
        numerics: Iterable[str] = tuple(NUMERICS),
        per_engine: int = 2,
        num_requests: int = REQUESTS,
        num_ranks: int = 1,
        twins: float = 1.0,
    ) -> None:
        self.plain = plain
        self.twins = twins
        self.seed = seed
        self.per_engine = per_engine
        models = (SERVED, ATTENTION, MIXTURE) if companions else (SERVED,)
        self.table: FeatureTable = feature_table(
            models,
            tuple(numerics) if companions else (AS_SERVED,),
            drafters,
            graphs,
            has_state=plain.llm.engine.plan.num_slots > 0,
            has_text=plain.llm.tokenizer is not None,
            has_thoughts=closing_tag(plain.llm) is not None,
            has_adapters=plain.has_adapters,
            has_one_rank=num_ranks == 1,
        )
        # A step of the served model takes several times as long as one of a companion.
        costly = [("model", SERVED)] if companions else []
        self.plan = CoveringPlan(self.table, strength, seed, per_engine, num_requests, costly)
        self.vocab = plain.llm.engine.vocab_size

    @cached_property
    def _texts(self) -> list[list[int]]:
        return short_prompts(self.plain.llm)

    def values(self, index: int) -> tuple[Values, ...]:
        """Return the planned values of a scenario's requests."""
        names = self.plan.values.names
        return tuple(dict(names[n] for n in row) for row in self.plan.scenario(index).rows())

    def kind(self, index: int) -> Kind:
        """Return the engine kind of a scenario."""
        values = self.values(index)[0]
        rng = random.Random(f"kind {self.seed} {index // self.per_engine}")
        drafts = int(values["drafts"])
        return Kind(
            drafter=values["drafter"],
            drafts=drafts,
            changing=values["draft counts"] == "changing",
            lookup=rng.choice((1, 1, 2)) if drafts else 1,
            buckets=rng.choice(BUCKETS[values["row buckets"]]),
            in_flight=int(values["steps in flight"]),
            graph=values["graph"],
            adapters=values["adapters"] == "yes",
            model=values["model"],
            numerics=values["numerics"],
            kept=rng.choice(FEW_ANSWERS) if values["answers kept"] == "few" else ANSWERS_KEPT,
        )

    def generate(self, index: int) -> GeneratedScenario:
        """Return scenario number `index` with the values of its requests."""
        planned = self.values(index)
        kind = self.kind(index)
        # The text that seeds a generator is part of the meaning of --seed.
        rng = random.Random(f"scenario {self.seed} {index}")
        plain = self.plain.for_kind(kind)
        family = self._family(rng)
        writer = RequestWriter(plain, kind, family, self.vocab, closing_tag(plain.llm))
        written = [writer.write(random.Random(rng.random()), values) for values in planned]
        requests = self._scheduled(rng, written)
        chosen = [one for one in written if rng.random() < self.twins]
        twins = [twin for one in chosen if (twin := _undisturbed(rng, one)) is not None]
        twins += _twins_of_moved_prompts(random.Random(f"twins {self.seed} {index}"), written)
        # No value counts as met by a request whose answer ends at a wrong token.
        wrong = _with_wrong_token(random.Random(f"wrong {self.seed} {index}"), written)
        requests = (*requests, *(twin.request for twin in twins), *wrong)
        limits = self._limits(rng, kind, planned[0], requests, [w for o in written for w in o.warm])
        scenario = Scenario(
            kind,
            limits,
            requests,
            self._warm_prefixes(rng, limits, written),
            poison_seed=rng.randrange(2**31),
            draws=rng.randrange(2**31),
        )
        return GeneratedScenario(scenario, tuple(one.values for one in (*written, *twins)))

    def scenario(self, index: int) -> Scenario:
        """Return scenario number `index`."""
        return self.generate(index).scenario

    def _scheduled(
        self, rng: random.Random, written: list[WrittenRequest]
    ) -> tuple[ScenarioRequest, ...]:
        """Choose the steps at which requests arrive.

        Requests with a cached prefix come first, those whose prefix is in host memory before all:
        pages of other requests would evict it.
        """
        first = int(any(map(_is_evicted, written)))
        requests = []
        for one in written:
            arrival = 0 if rng.random() < 0.5 else rng.randrange(10)
            if one.warm:
                arrival = min(arrival, 1)
            arrival = 0 if _is_evicted(one) else first + arrival
            requests.append(replace(one.request, arrival=arrival))
        return tuple(requests)

    def _limits(
        self,
        rng: random.Random,
        kind: Kind,
        values: Values,
        requests: tuple[ScenarioRequest, ...],
        warm: list[WarmPrefix],
    ) -> Limits:
        """Return the limits of a scenario. Its cache has pages for its longest request at least."""
        min_pages = max(-(-(len(r.prompt) + r.params["max_tokens"]) // PAGE) for r in requests)
        min_pages = max([min_pages, *(len(w.prompt) // PAGE + 1 + w.tokens // PAGE for w in warm)])
        pages = {"all": MAX_PAGES, "one spare": min_pages + 1, "least": min_pages}[values["pages"]]
        rows = values["rows"]
        failure = values["failure"]
        chunk = values["chunk"]
        host = rng.choice(HOST_PAGES[values["host tier"]])
        snapshots = values["snapshots"]
        return Limits(
            rows=kind.buckets[-1] if rows == "all" else int(rows),
            chunk=2048 if chunk == "whole" else int(chunk),
            pages=min(pages, MAX_PAGES),
            snapshots=int(snapshots) if snapshots.isdecimal() else 0,
            host=host,
            caching=values["prefix cache"] == "on",
            preempt_every=0 if values["preempt every"] == "never" else int(values["preempt every"]),
            policy=values["policy"],
            slab_pages=rng.choice((1, 3)) if values["host slabs"] == "several" else 0,
            failure=failure,
            failure_step=0 if failure == NO_FAILURE else rng.randrange(2, 9),
        )

    def _warm_prefixes(
        self, rng: random.Random, limits: Limits, written: list[WrittenRequest]
    ) -> tuple[WarmPrefix, ...]:
        """Return the prompts that run first. Those that are meant to be evicted come before all."""
        evicted: list[WarmPrefix] = []
        kept: list[WarmPrefix] = []
        for one in written:
            (evicted if _is_evicted(one) else kept).extend(one.warm)
        fillers = []
        if evicted:
            # Fillers and kept prefixes together have the cache's pages. With more, they would evict
            # each other, and a small host tier would have their pages instead.
            remaining = max(limits.pages - sum(len(w.prompt) // PAGE for w in kept), 1)
            while remaining > 0:
                pages = min(FILLER_PAGES, remaining)
                remaining -= pages
                # A page that is not full is free after its prompt, so only the last one has one.
                length = pages * PAGE - (0 if remaining else rng.randrange(2, 20))
                fillers.append(WarmPrefix(tuple(rng.choices(range(self.vocab), k=length))))
        return (*evicted, *fillers, *kept)

    def _family(self, rng: random.Random) -> Family:
        """Return texts of which the prompts of a scenario are made."""
        length = 640
        if rng.random() < 0.6:
            stream = [t for text in rng.sample(self._texts, len(self._texts)) for t in text]
            stream = stream * (2 * length // len(stream) + 2)
            start = rng.randrange(len(stream) - 2 * length)
            trunk = stream[start : start + length]
            other = stream[start + length : start + 2 * length]
        else:
            trunk, other = (self._pattern(rng, length) for _ in range(2))
        ends = [text[-rng.randrange(8, 30) :] for text in self._texts]
        return Family(tuple(trunk), tuple(other), tuple(tuple(e) for e in ends))

    def _pattern(self, rng: random.Random, length: int) -> list[int]:
        """Return repeated random ids, in which an n-gram drafter finds matches."""
        pattern = rng.choices(range(self.vocab), k=rng.choice((7, 23, 200)))
        return (pattern * (length // len(pattern) + 1))[:length]


def _undisturbed(rng: random.Random, written: WrittenRequest) -> WrittenRequest | None:
    """Return the same request for a later step, whose answer is drafted and ends as planned.

    Most rows of an array abort a request, force its tokens, or let it draft nothing. The plain
    answer is known, so that such a twin costs no plain run. None if it would be the request again.
    """
    request = written.request
    undisturbed = replace(
        request,
        abort=NEVER,
        preempt=(),
        returns=AT_ONCE,
        forced=0,
        speculate=True,
        again=False,
    )
    if undisturbed == request:
        return None
    values = {**written.values, **{name: USUAL[name] for name in _DISTURBANCES}}
    values |= {"forced": "none", "speculate": "yes"}
    if "prompt logprobs" in values and values["prompt logprobs"] == "off":
        values["prefix"] = "on device"  # it counts only if the first request's pages are resumed
    arrival = rng.randrange(2, LAST_ARRIVAL)
    # Pages of another salt must not be resumed.
    if rng.random() < OTHER_SALT:
        undisturbed = replace(undisturbed, salt="" if request.salt else SALT)
        values["salt"] = "none" if request.salt else "own"
    return WrittenRequest(replace(undisturbed, arrival=arrival), values)


def _twins_of_moved_prompts(
    rng: random.Random, written: list[WrittenRequest]
) -> list[WrittenRequest]:
    """Return twins of aborted requests that lose their row within their prompt to another request.

    A twin is not aborted, and no other request has its number of prompt log-probabilities. Those of
    a chunk that is in flight must not be computed for the row's next request.
    """
    twins = []
    for one in written:
        request = one.request
        has_logprobs = request.params.get("prompt_logprobs") is not None
        loses_row = request.preempt == (IN_PROMPT,) and request.returns != AT_ONCE
        if not (loses_row and has_logprobs and request.abort != NEVER):
            continue
        twin = replace(
            request,
            params={**request.params, "prompt_logprobs": TWIN_LOGPROBS},
            arrival=rng.randrange(2, LAST_ARRIVAL),
            abort=NEVER,
            again=False,
            forced=0,
        )
        values = {**one.values, "aborted": USUAL["aborted"], "id": USUAL["id"], "forced": "none"}
        values.pop("prompt logprobs", None)
        twins.append(WrittenRequest(twin, values))
    return twins


def _with_wrong_token(
    rng: random.Random, written: list[WrittenRequest]
) -> tuple[ScenarioRequest, ...]:
    """Return one of the requests, if any permits it, with a wrong token among its forced ones."""
    # After a token that it forbids, a grammar has no state.
    permitted = [
        one for one in written if one.num_tokens and not GRAMMARS & one.request.params.keys()
    ]
    if not permitted:
        return ()
    one = rng.choice(permitted)
    wrong = rng.randrange(one.num_tokens)
    forced = rng.randrange(wrong + 1, one.num_tokens + 1)
    undisturbed = replace(one.request, abort=NEVER, preempt=(), returns=AT_ONCE, again=False)
    arrival = rng.randrange(2, LAST_ARRIVAL)
    reports = rng.random() < 0.5
    return (replace(undisturbed, forced=forced, wrong=wrong, reports=reports, arrival=arrival),)


def _is_evicted(written: WrittenRequest) -> bool:
    """Return whether a request's prefix is evicted to host memory before it comes."""
    return written.values.get("prefix") == IN_HOST_MEMORY


def met_values(values: Values, events: set[Event]) -> Values:
    """Return the values of a request that it really had.

    events: values of the features that depend on the run.
    """
    met = {}
    for name, value in values.items():
        usual = USUAL.get(name)
        if usual is None or (name, value) in events or (value == usual and name != "prefix"):
            met[name] = value
    return met


USUAL = {
    "prefix": "new",
    "preempted": "never",
    "return": "at once",
    "aborted": "never",
    "id": "once",
    FAILURE: NO_FAILURE,
}
"""Features whose values depend on the run, with the value that needs no event."""
_DISTURBANCES = ("preempted", "return", "aborted", "id")
"""Features whose usual value a twin has."""
