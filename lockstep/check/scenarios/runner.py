"""Run scenarios on an engine of one kind, with a new scheduler and poisoned memory for each."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.check import oracle_drafter
from lockstep.check.engines import CheckEngine, Completion
from lockstep.check.judges.answers import Answer, took_place
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.scenarios.invariants import CheckedScheduler, InvariantError, check_no_leaks
from lockstep.check.scenarios.scenario import Kind, Scenario, ScenarioRequest
from lockstep.engine.engine import Engine
from lockstep.engine.scheduler_factory import cache_config
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.worker import memory
from lockstep.worker.executor import worker_of

MAX_STEPS = 3000
"""Maximum steps of a scenario; one that takes longer is a failure."""


@dataclass
class Played:
    """Result of a scenario: outputs by request and completion, and counters of its events."""

    answers: list[list[Answer]]
    seen: Counter[str] = field(default_factory=Counter)


class ScenarioRunner:
    """Runner of scenarios on one engine."""

    def __init__(self, engine: CheckEngine, kind: Kind) -> None:
        self.engine = engine
        self.kind = kind

    def play(self, scenario: Scenario, plain: PlainRuns) -> Played:
        """Run a scenario and return its result.

        Raises what the engine raises, and InvariantError. The runner may not be used after that.
        """
        self._set(scenario)
        if scenario.kind.drafter == oracle_drafter.NAME:
            self.engine.set_texts(oracle_texts(scenario, plain))
        for prompt in scenario.warm_prefixes:
            self.engine.cache([prompt])
        seen: Counter[str] = Counter()
        digests = LogitDigests()
        with self.engine.observed(digests), self._watched_drafts(seen):
            completions = self._drive(scenario, seen)
        found = digests.by_request()
        answers = [[c.answer(found.get(c.request.id, ())) for c in own] for own in completions]
        for answer in (answer for own in answers for answer in own):
            if answer.metrics.num_accepted_tokens > answer.metrics.num_draft_tokens:
                raise InvariantError("more drafts were accepted than there were")
        for own, given in zip(answers, scenario.requests, strict=True):
            if not given.speculate and any(answer.metrics.num_draft_tokens for answer in own):
                raise InvariantError("drafts were verified of a request that wants none")
        seen.update(took_place(answer for own in answers for answer in own))
        seen["aborted completions"] += sum(c.aborted for own in completions for c in own)
        for group in self.engine.engine.scheduler.cache.groups:
            shelf = group.pool.host
            seen[f"{shelf.name} loaded from host memory"] = shelf.num_back
        check_no_leaks(self.engine.engine)
        return Played(answers, seen)

    def _set(self, scenario: Scenario) -> None:
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
            num_pages=limits.pages + 1,
            num_state_slots=1 + limits.rows + limits.snapshots if has_state else 0,
            host_pages=host_pages,
            max_num_seqs=limits.rows,
        )
        self.engine.renew(cache, CheckedScheduler, **options)
        transfers = worker_of(engine).transfers
        transfers.host = memory.host_memory(host_pages, plan.page_bytes, plan.device)
        poison_memory(engine, scenario.poison_seed)

    def _drive(self, scenario: Scenario, seen: Counter[str]) -> list[list[Completion]]:
        """Step the engine; add, abort and preempt requests at their steps."""
        engine = self.engine.engine
        completions = [
            self.engine.completions(f"r{index}", given.prompt, given.sampling(), given.priority)
            for index, given in enumerate(scenario.requests)
        ]
        for own, given in zip(completions, scenario.requests, strict=True):
            for completion in own:
                completion.request.speculate = given.speculate
                completion.request.cache_salt = given.salt
        by_id = {completion.request.id: completion for own in completions for completion in own}
        last = max((given.arrival for given in scenario.requests), default=0)
        for turn in range(MAX_STEPS):
            for own, given in zip(completions, scenario.requests, strict=True):
                _happens(engine, own, given, turn, seen)
            if turn > last and not engine.has_work():
                return completions
            touched = engine.step()
            engine.scheduler.cache.check()
            for request in touched:
                if by_id[request.id].take():
                    engine.abort(request.id)
        raise InvariantError(f"requests still run after {MAX_STEPS} steps")

    @contextmanager
    def _watched_drafts(self, seen: Counter[str]) -> Iterator[None]:
        """Count the drafter's calls and check its contract, if the engine runs without graphs."""
        drafter = self.engine.drafter
        if drafter is None or self.engine.engine.plan.graph_mode != "none":
            yield
            return
        drafter.seen = seen
        try:
            yield
        finally:
            drafter.seen = None


def oracle_texts(scenario: Scenario, plain: PlainRuns) -> list[list[int]]:
    """Return the token sequences for the oracle drafter: prompts with their outputs."""
    return [
        [*given.prompt, *answer.tokens]
        for given in scenario.requests
        for answer in plain.answers(given.prompt, scenario.alone(given))
    ]


def _happens(
    engine: Engine, own: list[Completion], given: ScenarioRequest, turn: int, seen: Counter[str]
) -> None:
    """Add, preempt or abort a request if its schedule says so for this step."""
    if turn == given.arrival:
        for completion in own:
            engine.add(completion.request)
    for completion in own:
        request_id = completion.request.id
        if turn in given.preempt and not completion.text.finished:
            engine.scheduler.force_preempt(request_id)
        moved = request_id in worker_of(engine).saved
        if turn == given.abort and engine.abort(request_id) is not None:
            completion.aborted = True
            seen["completions aborted in host memory"] += moved


@torch.inference_mode()
def poison_memory(engine: Engine, seed: int) -> None:
    """Fill the memory of rows, pages and states with random values, except for the null row.

    Memory that was never written must not influence an output.
    """
    generator = torch.Generator().manual_seed(seed)
    runner = worker_of(engine)
    table = runner.table

    def drawn(tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return torch.rand(tensor.shape, generator=generator) < 0.5
        if tensor.dtype.is_floating_point:
            return torch.randn(tensor.shape, generator=generator)
        return torch.randint(1, 64, tensor.shape, generator=generator)

    for tensor in [*table.row_tensors(), table.state_slots]:
        if tensor.numel():
            tensor[1:] = drawn(tensor[1:]).to(tensor.device, tensor.dtype)
    table.page_table[1:] = 0
    for tensor in (*runner.paged, *runner.state, *runner.transfers.host):
        tensor.copy_(drawn(tensor).to(tensor.device, tensor.dtype))
