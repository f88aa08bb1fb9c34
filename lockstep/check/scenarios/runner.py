"""Run scenarios on an engine of one kind, with a new scheduler and poisoned memory for each."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.check import oracle_drafter
from lockstep.check.drafters import prediction_of
from lockstep.check.engines import CheckEngine, Completion
from lockstep.check.judges.answers import FORCED, Answer, count_events
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.scenarios.invariants import CheckedScheduler, InvariantError, check_no_leaks
from lockstep.check.scenarios.scenario import Kind, Scenario, ScenarioRequest
from lockstep.engine.engine import Engine
from lockstep.engine.scheduler_factory import cache_config
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec import prediction
from lockstep.worker import memory
from lockstep.worker.executor import executor_of, worker_of
from lockstep.worker.worker import Worker

MAX_STEPS = 3000
"""Maximum steps of a scenario; one that takes longer is a failure."""


@dataclass
class ScenarioResult:
    """Result of a scenario: outputs by request and completion, and counters of its events."""

    answers: list[list[Answer]]
    events: Counter[str] = field(default_factory=Counter)


class ScenarioRunner:
    """Runner of scenarios on one engine."""

    def __init__(self, engine: CheckEngine, kind: Kind) -> None:
        self.engine = engine
        self.kind = kind

    def play(self, scenario: Scenario, plain: PlainRuns) -> ScenarioResult:
        """Run a scenario and return its result.

        Raises what the engine raises, and InvariantError. The runner may not be used after that.
        """
        self._install(scenario)
        if scenario.kind.drafter == oracle_drafter.NAME:
            self.engine.set_texts(oracle_texts(scenario, plain))
        for prompt in scenario.warm_prefixes:
            self.engine.cache([prompt])
        events: Counter[str] = Counter()
        digests = LogitDigests()
        with self.engine.observed(digests), self._watched_drafts(events):
            completions = self._drive(scenario, plain, events)
        digests_by_id = digests.by_request()
        answers = [
            [
                completion.answer(digests_by_id.get(completion.request.id, ()))
                for completion in completions_of_request
            ]
            for completions_of_request in completions
        ]
        for answer in (
            answer for completions_of_request in answers for answer in completions_of_request
        ):
            if answer.metrics.num_accepted_tokens > answer.metrics.num_draft_tokens:
                raise InvariantError("more drafts were accepted than there were")
        for completions_of_request, request in zip(answers, scenario.requests, strict=True):
            if not request.speculate and any(
                answer.metrics.num_draft_tokens for answer in completions_of_request
            ):
                raise InvariantError("drafts were verified of a request that wants none")
        events.update(
            count_events(
                answer for completions_of_request in answers for answer in completions_of_request
            )
        )
        events[FORCED] += sum(
            completion.request.token_sources.count("forced")
            for completions_of_request in completions
            for completion in completions_of_request
        )
        events["requests with an adapter"] += sum(bool(r.adapter) for r in scenario.requests)
        events["aborted completions"] += sum(
            completion.aborted
            for completions_of_request in completions
            for completion in completions_of_request
        )
        for group in self.engine.engine.scheduler.cache.groups:
            host_pool = group.pool.host
            events[f"{host_pool.name} loaded from host memory"] = host_pool.num_back
        check_no_leaks(self.engine.engine)
        return ScenarioResult(answers, events)

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
        executor_of(engine).collective_rpc(partial(_resize_host_memory, host_pages=host_pages))
        poison_memory(engine, scenario.poison_seed)

    def _drive(
        self, scenario: Scenario, plain: PlainRuns, events: Counter[str]
    ) -> list[list[Completion]]:
        """Step the engine; add, abort and preempt requests at their steps."""
        engine = self.engine.engine
        completions = [
            self.engine.completions(
                f"r{index}", request.prompt, request.sampling(), request.priority
            )
            for index, request in enumerate(scenario.requests)
        ]
        for request_completions, request in zip(completions, scenario.requests, strict=True):
            for completion in request_completions:
                completion.request.speculate = request.speculate
                completion.request.cache_salt = request.salt
                completion.request.adapter = request.adapter
            _add_plain_tokens(scenario, request, request_completions, plain)
        by_id = {
            completion.request.id: completion
            for request_completions in completions
            for completion in request_completions
        }
        last_arrival = max((request.arrival for request in scenario.requests), default=0)
        for step in range(MAX_STEPS):
            for request_completions, request in zip(completions, scenario.requests, strict=True):
                _apply_schedule(engine, request_completions, request, step, events)
            if step > last_arrival and not engine.has_work():
                return completions
            updated = engine.step()
            engine.scheduler.cache.check()
            for engine_request in updated:
                if by_id[engine_request.id].update():
                    engine.abort(engine_request.id)
        raise InvariantError(f"requests still run after {MAX_STEPS} steps")

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
    return plain.of(request.adapter).answers(request.prompt, params)


def _add_plain_tokens(
    scenario: Scenario,
    request: ScenarioRequest,
    completions: list[Completion],
    plain: PlainRuns,
) -> None:
    """Force the first plain tokens of a request; predict texts like its plain outputs.

    Every fourth completion has no predicted text.
    """
    is_predicted = scenario.kind.drafter == prediction.METHOD
    if not (request.forced or is_predicted):
        return
    answers = _plain_answers(scenario, request, plain)
    for completion, answer in zip(completions, answers, strict=True):
        changes: dict[str, Any] = {}
        if request.forced:
            changes["forced_token_ids"] = answer.tokens[: request.forced]
        if is_predicted and len(answer.tokens) % 4:
            changes["prediction"] = prediction_of(answer.tokens)
        completion.request.params = replace(completion.request.params, **changes)


def oracle_texts(scenario: Scenario, plain: PlainRuns) -> list[list[int]]:
    """Return the token sequences for the oracle drafter: prompts with their outputs."""
    return [
        [*request.prompt, *answer.tokens]
        for request in scenario.requests
        for answer in _plain_answers(scenario, request, plain)
    ]


def _apply_schedule(
    engine: Engine,
    completions: list[Completion],
    request: ScenarioRequest,
    step: int,
    events: Counter[str],
) -> None:
    """Add, preempt or abort a request if its schedule says so for this step."""
    if step == request.arrival:
        for completion in completions:
            engine.add(completion.request)
    for completion in completions:
        request_id = completion.request.id
        if step in request.preempt and not completion.text.finished:
            engine.scheduler.force_preempt(request_id)
        in_host_memory = request_id in worker_of(engine).saved
        if step == request.abort and engine.abort(request_id) is not None:
            completion.aborted = True
            events["completions aborted in host memory"] += in_host_memory


def poison_memory(engine: Engine, seed: int) -> None:
    """Fill the memory of rows, pages and states with random values, except for the null row.

    Memory that was never written must not influence an output.
    """
    executor_of(engine).collective_rpc(partial(_poison, seed=seed))


def _resize_host_memory(runner: Worker, host_pages: int) -> None:
    """Replace the host memory of one rank's worker by one of this many pages."""
    plan = runner.plan
    runner.transfers.host = memory.host_memory(host_pages, plan.page_bytes, plan.device)


@torch.inference_mode()
def _poison(runner: Worker, seed: int) -> None:
    """Fill the memory of one rank's worker; the row tables of all ranks get the same values."""
    generator = torch.Generator().manual_seed(seed)
    table = runner.table

    def random_values(tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return torch.rand(tensor.shape, generator=generator) < 0.5
        if tensor.dtype.is_floating_point:
            return torch.randn(tensor.shape, generator=generator)
        return torch.randint(1, 64, tensor.shape, generator=generator)

    # Row 0 is the null row, which padding reads and nothing writes.
    for tensor in [*table.row_tensors(), table.state_slots]:
        if tensor.numel():
            tensor[1:] = random_values(tensor[1:]).to(tensor.device, tensor.dtype)
    table.page_table[1:] = 0
    for tensor in (*runner.paged, *runner.state, *runner.transfers.host):
        tensor.copy_(random_values(tensor).to(tensor.device, tensor.dtype))
