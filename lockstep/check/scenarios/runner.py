"""Run scenarios on an engine of one kind, with a new scheduler and poisoned memory for each."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lockstep.answer import Answer
from lockstep.check import oracle_drafter
from lockstep.check.drafters import prediction_of
from lockstep.check.engines import CheckEngine, Completion
from lockstep.check.events import FORCED, JOINT_STEPS, count_events
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.judges.plain_runs import PlainRuns, seed_of
from lockstep.check.judges.texts import wrong_scores
from lockstep.check.scenarios.accounting import Ledger, Observed, wrong_metrics
from lockstep.check.scenarios.driver import FAILED_STEPS, Driver, Progress
from lockstep.check.scenarios.features import FAILURE, Event
from lockstep.check.scenarios.invariants import (
    CheckedScheduler,
    InvariantError,
    check_no_leaks,
    raise_if,
)
from lockstep.check.scenarios.inventory import poison, rows_and_units
from lockstep.check.scenarios.scenario import NONE_WRONG, Kind, Scenario, ScenarioRequest
from lockstep.engine.engine import Engine
from lockstep.engine.scheduler_factory import cache_config
from lockstep.outputs import ForcedMismatch
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec import prediction
from lockstep.step import PAGE_SIZE
from lockstep.worker import memory
from lockstep.worker.executor import executor_of, worker_of
from lockstep.worker.worker import Worker


@dataclass(frozen=True)
class PlayedAnswer:
    """Output of a scenario. request, completion: index of its request, and among the n of it."""

    request: int
    completion: int
    answer: Answer
    aborted: bool


@dataclass
class ScenarioResult:
    """Result of a scenario.

    answers: outputs, those of reused ids too. events: counters. met: per request, the features that
    depend on the run and that it really had. fault: what is wrong with metrics, totals or memory
    after the run; an answer that differs explains it better. violation: invariant that ended the
    run; answers that had not ended count as aborted.
    """

    answers: list[PlayedAnswer]
    events: Counter[str] = field(default_factory=Counter)
    met: list[set[Event]] = field(default_factory=list)
    fault: str | None = None
    violation: str | None = None


class ScenarioRunner:
    """Runner of scenarios on one engine."""

    def __init__(self, engine: CheckEngine, kind: Kind) -> None:
        self.engine = engine
        self.kind = kind

    def play(self, scenario: Scenario, plain: PlainRuns) -> ScenarioResult:
        """Run a scenario and return its result.

        Raises what the engine raises. The runner may not be used after that, or after a result with
        a fault or a violation.
        """
        plain = plain.for_kind(scenario.kind)
        self._install(scenario)
        if scenario.kind.drafter == oracle_drafter.NAME:
            self.engine.set_texts(oracle_texts(scenario, plain))
        for prefix in scenario.warm_prefixes:
            self.engine.cache_prefix(prefix.prompt, prefix.tokens, prefix.salt, prefix.adapter)
        events: Counter[str] = Counter()
        digests = LogitDigests()
        driver = Driver(self.engine, scenario.limits, events)
        num_warm = len(driver.scheduler.requests)
        ledger = Ledger(self.engine.engine)

        def remake(ended: Progress) -> Progress:
            """Return the same completion again, which nothing disturbs."""
            completion = self._made(scenario, ended.index, plain)[ended.number]
            return Progress(ended.index, ended.number, ended.request, completion)

        violation = None
        with self.engine.observed(digests), self._watched_drafts(events):
            try:
                driver.drive(self._completions(scenario, plain), remake)
            except InvariantError as error:
                violation = str(error)
        digests_by_id = digests.by_request()
        outcomes = [
            PlayedAnswer(
                one.index,
                one.number,
                _before_wrong(one, one.completion.answer(digests_by_id.get(one.id, ()))),
                one.completion.aborted
                or one.request.wrong != NONE_WRONG
                or (violation is not None and not one.completion.text.finished),
            )
            for one in driver.all
        ]
        if violation is not None:
            return ScenarioResult(outcomes, events, violation=violation)
        for one in driver.all:
            one.events.update(_prefix_events(scenario, one, driver.scheduler))
        events.update(count_events(outcome.answer for outcome in outcomes))
        _count_driven(scenario, driver, events)
        met: list[set[Event]] = [set() for _ in scenario.requests]
        for one in driver.all:
            met[one.index] |= one.events
        result = ScenarioResult(outcomes, events, met)
        try:
            for one in driver.all:
                self._check_client(one)
                self._check_forced(one, scenario, plain)
            check_no_leaks(self.engine.engine)
            requests = driver.scheduler.requests[num_warm:]
            raise_if(ledger.wrong_totals(requests, bool(events[FAILED_STEPS])))
            raise_if(_wrong_cache_totals(driver.scheduler))
        except InvariantError as error:
            result.fault = str(error)
        return result

    def _check_client(self, progress: Progress) -> None:
        """Check the metrics of a completion, and what its client got besides tokens and text.

        Raises InvariantError.
        """
        request = progress.completion.request
        output = progress.completion.text.output
        cached = 0 if progress.resumed is None else progress.resumed.tokens
        has_failed = any(name == FAILURE for name, _ in progress.events)
        observed = Observed(request, cached, progress.num_preempted, has_failed)
        fault = wrong_metrics(observed, self.kind.drafts)
        fault = fault or wrong_scores(self.engine.llm.tokenizer, output)
        seed = seed_of(progress.request.sampling(), request, progress.number)
        identity = (progress.number, seed)
        if fault is None and (output.index, output.seed) != identity:
            fault = f"index and seed {(output.index, output.seed)} instead of {identity}"
        if fault is not None:
            raise InvariantError(f"request {request.id}: {fault}")

    def _check_forced(self, progress: Progress, scenario: Scenario, plain: PlainRuns) -> None:
        """Check which forced token was reported as wrong, and that the answer ended if it must.

        Raises InvariantError.
        """
        request = progress.completion.request
        if progress.completion.aborted or not request.forced_token_ids:
            return
        answer = _plain_answers(scenario, progress.request, plain)[progress.number]
        pairs = enumerate(zip(request.forced_token_ids, answer.tokens, strict=False))
        wrong = (
            ForcedMismatch(i, forced, chosen) for i, (forced, chosen) in pairs if forced != chosen
        )
        expected = next(wrong, None)
        actual = request.metrics.forced_mismatch
        if actual != expected:
            raise InvariantError(f"request {request.id}: {actual} instead of {expected}")
        if expected is None:
            return
        output = request.output_token_ids
        if progress.request.reports:
            num_forced = len(request.forced_token_ids)
            if isinstance(progress.completion.text.output.stop_reason, str):
                # The wrong token's text may have a stop string, which ends the answer early.
                num_forced = min(num_forced, max(len(output), expected.index + 1))
            goes_on = output[:num_forced] == list(request.forced_token_ids[:num_forced])
        else:
            goes_on = (request.finish_reason, len(output)) != ("error", expected.index)
        if goes_on != progress.request.reports:
            raise InvariantError(
                f"request {request.id} ended by {request.finish_reason} after {len(output)} tokens "
                f"with {expected}"
            )

    def _install(self, scenario: Scenario) -> None:
        """Install a scheduler and a cache with the scenario's limits, and poison the memory."""
        engine = self.engine.engine
        limits = scenario.limits
        has_state = engine.plan.num_slots > 0
        options: dict[str, Any] = {
            "max_num_seqs": limits.rows,
            "max_num_batched_tokens": limits.chunk,
            "max_model_len": limits.length,
            "policy": limits.policy,
            "preempt_every": limits.preempt_every,
        }
        if scenario.kind.changing:
            rng = random.Random(scenario.draws)
            options["draft_policy"] = RandomDraftLength(engine.plan.draft_lengths, rng)
        plan = engine.plan
        host_pages = limits.host * (1 + plan.slot_host_pages)
        cache = replace(
            cache_config(plan, limits.caching),
            # Page 0 is the null page.
            num_pages=limits.pages + 1,
            num_state_slots=1 + limits.rows + limits.snapshots if has_state else 0,
            host_pages=host_pages,
            max_num_seqs=limits.rows,
        )
        self.engine.reset(cache, CheckedScheduler, **options)
        scheduler = engine.scheduler
        assert isinstance(scheduler, CheckedScheduler)
        columns = worker_of(engine).table.tokens.shape[1]
        scheduler.plans.spare_columns = columns - plan.max_model_len
        # Its invariants are checked with those of the cache.
        engine.scheduler.cache.log_blocks()
        slab_bytes = limits.slab_pages * plan.page_bytes or memory.SLAB_BYTES
        executor_of(engine).collective_rpc(
            partial(_resize_host_memory, host_pages=host_pages, slab_bytes=slab_bytes)
        )
        poison_memory(engine, scenario.poison_seed)

    def _completions(self, scenario: Scenario, plain: PlainRuns) -> list[Progress]:
        """Create the completions of all requests, with what the scenario does to them."""
        progresses = []
        for index, request in enumerate(scenario.requests):
            for number, completion in enumerate(self._made(scenario, index, plain)):
                progresses.append(
                    Progress(
                        index,
                        number,
                        request,
                        completion,
                        list(request.preempt),
                        request.abort,
                        request.again,
                    )
                )
        return progresses

    def _made(self, scenario: Scenario, index: int, plain: PlainRuns) -> list[Completion]:
        """Create the completions of one request."""
        request = scenario.requests[index]
        completions = self.engine.completions(
            f"r{index}",
            request.prompt,
            request.sampling(),
            request.priority,
            request.conversation,
        )
        for completion in completions:
            completion.request.speculate = request.speculate
            completion.request.cache_salt = request.salt
            completion.request.adapter = request.adapter
        _add_plain_tokens(scenario, request, completions, plain, self.engine.engine.vocab_size)
        return completions

    @contextmanager
    def _watched_drafts(self, events: Counter[str]) -> Iterator[None]:
        """Count the drafter's calls and check its contract, if the engine runs without graphs."""
        drafter = self.engine.drafter
        if drafter is None or self.engine.engine.plan.graph_mode != "none":
            yield
            return
        drafter.events = events
        try:
            yield
        finally:
            drafter.events = None


def _plain_answers(scenario: Scenario, request: ScenarioRequest, plain: PlainRuns) -> list[Answer]:
    """Return the plain outputs of a request."""
    params = scenario.plain_params(request)
    return plain.of(request.adapter).answers(request.prompt, params, request.conversation)


def _add_plain_tokens(
    scenario: Scenario,
    request: ScenarioRequest,
    completions: list[Completion],
    plain: PlainRuns,
    vocab: int,
) -> None:
    """Force the first plain tokens of a request; predict its plain outputs, or texts like them.

    The length of an output decides: one in four has no predicted text, one the output itself. One
    of the forced tokens is wrong if the request says so.
    """
    is_predicted = scenario.kind.drafter == prediction.METHOD
    if not (request.forced or is_predicted):
        return
    answers = _plain_answers(scenario, request, plain)
    for completion, answer in zip(completions, answers, strict=True):
        changes: dict[str, Any] = {}
        if request.forced:
            forced = list(answer.tokens[: request.forced])
            if request.wrong in range(len(forced)):
                forced[request.wrong] = _other_token(forced[request.wrong], completion, vocab)
                changes["forced_mismatch"] = "report" if request.reports else "error"
            changes["forced_token_ids"] = forced
        kind = len(answer.tokens) % 4
        if is_predicted and kind:
            exact = list(answer.tokens)
            changes["prediction"] = exact if kind == 1 else prediction_of(answer.tokens)
        completion.request.params = replace(completion.request.params, **changes)


def _before_wrong(progress: Progress, answer: Answer) -> Answer:
    """Return the part of an answer that must be a prefix of the plain one."""
    wrong = progress.request.wrong
    if wrong == NONE_WRONG:
        return answer
    goes_on = wrong < len(answer.tokens)
    return replace(
        answer,
        tokens=answer.tokens[:wrong],
        logprobs=answer.logprobs[:wrong],
        digests=answer.digests[:wrong],
        # The wrong token's text follows, or U+FFFD for the bytes of a part of a character.
        text="" if goes_on else answer.text.rstrip("\N{REPLACEMENT CHARACTER}"),
    )


def _other_token(token: int, completion: Completion, vocab: int) -> int:
    """Return the next token id that ends no answer of the completion's request."""
    request = completion.request
    ends = {*request.eos_token_ids, *(request.params.stop_token_ids or ())}
    candidates = ((token + distance) % vocab for distance in range(1, vocab))
    return next(candidate for candidate in candidates if candidate not in ends)


def oracle_texts(scenario: Scenario, plain: PlainRuns) -> list[list[int]]:
    """Return the token sequences for the oracle drafter: prompts with their outputs."""
    return [
        [*request.prompt, *answer.tokens]
        for request in scenario.requests
        for answer in _plain_answers(scenario, request, plain)
    ]


def _wrong_cache_totals(scheduler: CheckedScheduler) -> str | None:
    """Return which total of a scenario's scheduler or cache is wrong, or None."""
    cache = scheduler.cache
    for name, actual, expected in (
        ("prefix_hits_total", cache.hit_tokens, scheduler.num_cached),
        ("preemptions_total", scheduler.preemptions, scheduler.total_preempted),
    ):
        if actual != expected:
            return f"{name} is {actual} instead of {expected}"
    return None


def _count_driven(scenario: Scenario, driver: Driver, events: Counter[str]) -> None:
    """Add the events that the requests and the scheduler of a driven scenario had."""
    for one in driver.all:
        events[FORCED] += one.completion.request.token_sources.count("forced")
    events[JOINT_STEPS] = driver.scheduler.num_joint_steps
    events["requests with an adapter"] += sum(bool(r.adapter) for r in scenario.requests)
    for group in driver.scheduler.cache.groups:
        host_pool = group.pool.host
        events[f"{host_pool.name} loaded from host memory"] = host_pool.num_fetched


def _prefix_events(
    scenario: Scenario, progress: Progress, scheduler: CheckedScheduler
) -> set[Event]:
    """Return where the cached prefix of a request came from, as values of "prefix"."""
    resumed = progress.resumed
    if resumed is None:
        return set()
    prompt = progress.request.prompt
    events = set()
    for prefix in scenario.warm_prefixes:
        length = len(prefix.prompt)
        if prefix.tokens > 1 and prompt[:length] == prefix.prompt:
            # With recurrent state the generated pages must not be resumed.
            shared = length // PAGE_SIZE * PAGE_SIZE
            if resumed.tokens > shared or scheduler.cache.state is not None:
                events.add(("prefix", "generated"))
    if resumed.from_host:
        events.add(("prefix", "in host memory"))
    elif resumed.tokens:
        events.add(("prefix", "on device"))
    else:
        events.add(("prefix", "new"))
    if resumed.branch:
        events.add(("prefix", "without a snapshot"))
    return events


def poison_memory(engine: Engine, seed: int) -> None:
    """Fill the memory of rows, pages and states with random values, except for the null row.

    Memory that was never written must not influence an output.
    """
    executor_of(engine).collective_rpc(partial(_poison, seed=seed))


def _resize_host_memory(worker: Worker, host_pages: int, slab_bytes: int) -> None:
    """Replace the host memory of one rank's worker by one of this many pages."""
    plan = worker.plan
    worker.transfers.host = memory.host_memory(host_pages, plan.page_bytes, plan.device, slab_bytes)


@torch.inference_mode()
def _poison(worker: Worker, seed: int) -> None:
    """Fill the memory of one rank's worker; the row tables of all ranks get the same values."""
    generator = torch.Generator().manual_seed(seed)
    table = worker.table

    rows, units = rows_and_units(worker)
    # Row 0 is the null row, which padding reads and nothing writes.
    for tensor in rows:
        poison(tensor[1:], generator)
    table.page_table[1:] = 0
    for tensor in (*units, *worker.transfers.host):
        poison(tensor, generator)
