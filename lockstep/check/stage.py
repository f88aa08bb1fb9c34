"""Where worlds are played: an engine of one kind, set anew and made dirty for each world."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.check import answer_oracle
from lockstep.check.answers import Answer, took_place
from lockstep.check.digests import LogitDigests
from lockstep.check.harness import CheckEngine, Completion
from lockstep.check.plain import PlainRuns
from lockstep.check.rules import RuledScheduler, WorldError, leaves_nothing
from lockstep.check.world import Kind, World, WorldRequest
from lockstep.engine.engine import Engine
from lockstep.engine.scheduler_factory import cache_config
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.worker import memory
from lockstep.worker.executor import worker_of

MOST_STEPS = 3000
"""A world that is not done by then does not end."""


@dataclass
class Played:
    """What came of a world: answers by request and completion, and what took place in it."""

    answers: list[list[Answer]]
    seen: Counter[str] = field(default_factory=Counter)


class Stage:
    """An engine of one kind."""

    def __init__(self, engine: CheckEngine, kind: Kind) -> None:
        self.engine = engine
        self.kind = kind

    def play(self, world: World, plain: PlainRuns) -> Played:
        """Runs a world. Raises what the engine raises, and WorldError; the stage is then spoilt."""
        self._set(world)
        if world.kind.drafter == answer_oracle.NAME:
            self.engine.tell(told_texts(world, plain))
        for prompt in world.primed:
            self.engine.cache([prompt])
        seen: Counter[str] = Counter()
        digests = LogitDigests()
        with self.engine.observed(digests), self._watched_drafts(seen):
            completions = self._drive(world, seen)
        found = digests.by_request()
        answers = [[c.answer(found.get(c.request.id, ())) for c in own] for own in completions]
        for answer in (answer for own in answers for answer in own):
            if answer.metrics.num_accepted_tokens > answer.metrics.num_draft_tokens:
                raise WorldError("more drafts were accepted than there were")
        for own, given in zip(answers, world.requests, strict=True):
            if not given.speculate and any(answer.metrics.num_draft_tokens for answer in own):
                raise WorldError("drafts were verified of a request that wants none")
        seen.update(took_place(answer for own in answers for answer in own))
        seen["aborted"] += sum(completion.aborted for own in completions for completion in own)
        for group in self.engine.engine.scheduler.cache.groups:
            shelf = group.pool.host
            seen[f"{shelf.name} from host memory"] = shelf.num_back
        leaves_nothing(self.engine.engine)
        return Played(answers, seen)

    def _set(self, world: World) -> None:
        """A scheduler and a cache as the world wants them, and memory full of dirt."""
        engine = self.engine.engine
        limits = world.limits
        has_state = engine.plan.num_slots > 0
        options: dict[str, Any] = {
            "max_num_seqs": limits.rows,
            "max_num_batched_tokens": limits.chunk,
            "max_model_len": limits.length,
            "policy": limits.policy,
            "preempt_every": limits.preempt_every,
        }
        if world.kind.changing:
            rng = random.Random(world.draws)
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
        self.engine.renew(cache, RuledScheduler, **options)
        transfers = worker_of(engine).transfers
        transfers.host = memory.host_memory(host_pages, plan.page_bytes, plan.device)
        make_dirty(engine, world.dirt)

    def _drive(self, world: World, seen: Counter[str]) -> list[list[Completion]]:
        """Steps the engine; requests come, go and are moved to the host at their steps."""
        engine = self.engine.engine
        completions = [
            self.engine.completions(f"r{index}", given.prompt, given.sampling(), given.priority)
            for index, given in enumerate(world.requests)
        ]
        for own, given in zip(completions, world.requests, strict=True):
            for completion in own:
                completion.request.speculate = given.speculate
                completion.request.cache_salt = given.salt
        by_id = {completion.request.id: completion for own in completions for completion in own}
        last = max((given.arrival for given in world.requests), default=0)
        for turn in range(MOST_STEPS):
            for own, given in zip(completions, world.requests, strict=True):
                _happens(engine, own, given, turn, seen)
            if turn > last and not engine.has_work():
                return completions
            touched = engine.step()
            engine.scheduler.cache.check()
            for request in touched:
                if by_id[request.id].take():
                    engine.abort(request.id)
        raise WorldError(f"requests still run after {MOST_STEPS} steps")

    @contextmanager
    def _watched_drafts(self, seen: Counter[str]) -> Iterator[None]:
        """The drafter's contract is held meanwhile, where the engine has no graphs."""
        drafter = self.engine.drafter
        if drafter is None or self.engine.engine.plan.graph_mode != "none":
            yield
            return
        drafter.seen = seen
        try:
            yield
        finally:
            drafter.seen = None


def told_texts(world: World, plain: PlainRuns) -> list[list[int]]:
    """What a drafter that knows the answers is told: whole rows."""
    return [
        [*given.prompt, *answer.tokens]
        for given in world.requests
        for answer in plain.answers(given.prompt, world.alone(given))
    ]


def _happens(
    engine: Engine, own: list[Completion], given: WorldRequest, turn: int, seen: Counter[str]
) -> None:
    """What a request does at this step."""
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
            seen["aborted in host memory"] += moved


@torch.inference_mode()
def make_dirty(engine: Engine, seed: int) -> None:
    """Fills all memory of rows, pages and state with numbers that mean nothing, but for the null
    row: what nobody has written must not be read."""
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
