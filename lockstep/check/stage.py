"""Where worlds are played: an engine of one kind, set anew and made dirty for each world."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.check import answer_oracle
from lockstep.check.asks import Answer, as_bits
from lockstep.check.digests import watch
from lockstep.check.plain import PlainRuns, push
from lockstep.check.rules import Rules, WorldError, leaves_nothing
from lockstep.check.world import Asked, Kind, World
from lockstep.engine.engine import Engine
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Schedule
from lockstep.scheduling.scheduler import Scheduler
from lockstep.step import Step, Verdict
from lockstep.text.processor import CompletionText

MOST_STEPS = 3000
"""A world that is not done by then does not end."""
PRIME = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


@dataclass
class Line:
    """One completion while it is played."""

    request: Request
    text: CompletionText
    begun: bool = False


@dataclass
class Played:
    """What came of a world: answers by request and completion, and what took place in it."""

    answers: list[list[Answer]]
    seen: Counter[str] = field(default_factory=Counter)


class Stage:
    """An engine of one kind."""

    def __init__(self, llm: LLM, kind: Kind) -> None:
        self.llm, self.kind = llm, kind

    def play(self, world: World, plain: PlainRuns) -> Played:
        """Runs a world. Raises what the engine raises, and WorldError; the stage is then spoilt."""
        engine = self.llm.engine
        self._set(world)
        drafter = engine.runner.program.drafter
        if world.kind.drafter == answer_oracle.NAME:
            drafter.tell(told_texts(world, plain))  # type: ignore[attr-defined]
        for index, prompt in enumerate(world.primed):
            asked = {"prompt_token_ids": list(prompt)}
            requests = self.llm.processor.requests(f"primed-{index}", asked, PRIME)
            engine.run(requests, lambda request: None)
        seen: Counter[str] = Counter()
        with watch(self.llm) as digests, _watched_drafts(engine, self.kind.drafter, seen):
            lines = self._drive(world, seen)
        found = digests.by_request()
        answers = [[_answer(line, found) for line in own] for own in lines]
        _count(answers, lines, seen)
        leaves_nothing(engine)
        return Played(answers, seen)

    def _set(self, world: World) -> None:
        """A scheduler and a cache as the world wants them, and memory full of dirt."""
        engine, limits, page = self.llm.engine, world.limits, self.llm.engine.plan.page_size
        engine.clear()
        config = CacheConfig(
            num_pages=limits.pages + 1,
            page_size=page,
            num_state_slots=1 + limits.rows + limits.snapshots if engine.plan.num_slots else 0,
            max_num_seqs=limits.rows,
            enable_prefix_caching=limits.caching,
        )
        policy = engine.scheduler.draft_policy
        if world.kind.changing:
            policy = RandomDraftLength(engine.plan.draft_lengths, random.Random(world.draws))
        engine.scheduler = Scheduler(
            Cache(config),
            max_num_seqs=limits.rows,
            max_num_batched_tokens=limits.chunk,
            max_model_len=limits.length,
            query_len=engine.plan.query_len,
            row_buckets=engine.plan.row_buckets,
            draft_policy=policy,
            policy=limits.policy,
            preempt_every=limits.preempt_every,
        )
        make_dirty(engine, world.dirt)

    def _drive(self, world: World, seen: Counter[str]) -> list[list[Line]]:
        """Steps the engine; requests come, go and are moved to the host at their steps."""
        engine = self.llm.engine
        rules = Rules(engine.scheduler)
        lines = [self._lines(index, asked) for index, asked in enumerate(world.requests)]
        by_id = {line.request.id: line for own in lines for line in own}
        last = max((asked.arrival for asked in world.requests), default=0)
        for turn in range(MOST_STEPS):
            for own, asked in zip(lines, world.requests, strict=True):
                _happens(engine, own, asked, turn, seen)
            if turn > last and not engine.has_work():
                return lines
            for request in self._step(rules):
                line = by_id[request.id]
                if push(line.text, request):
                    engine.abort(request.id)
        raise WorldError(f"requests still run after {MOST_STEPS} steps")

    def _step(self, rules: Rules) -> list[Request]:
        """One step of the engine, whose schedule and cache are held to their own rules."""
        engine = self.llm.engine
        schedule = engine.scheduler.schedule

        def watched() -> Schedule:
            made = schedule()
            rules.hold(made)
            return made

        engine.scheduler.schedule = watched  # type: ignore[method-assign]
        try:
            touched = engine.step()
        finally:
            engine.scheduler.schedule = schedule  # type: ignore[method-assign]
        engine.scheduler.cache.check()
        return touched

    def _lines(self, index: int, asked: Asked) -> list[Line]:
        processor = self.llm.processor
        prompt = {"prompt_token_ids": list(asked.prompt)}
        requests = processor.requests(f"r{index}", prompt, asked.sampling(), asked.priority)
        return [Line(r, processor.completion(r, i)) for i, r in enumerate(requests)]


def told_texts(world: World, plain: PlainRuns) -> list[list[int]]:
    """What a drafter that knows the answers is told: whole rows."""
    return [
        [*asked.prompt, *answer.tokens]
        for asked in world.requests
        for answer in plain.answers(asked.prompt, asked.sampling())
    ]


def _happens(
    engine: Engine, lines: list[Line], asked: Asked, turn: int, seen: Counter[str]
) -> None:
    """What a request does at this step."""
    if turn == asked.arrival:
        for line in lines:
            engine.add(line.request)
    for line in lines:
        if turn in asked.preempt and not line.text.finished:
            engine.scheduler.force_preempt(line.request.id)
        moved = line.request.id in engine.runner.saved
        if turn == asked.abort and engine.abort(line.request.id) is not None:
            line.begun = True
            seen["aborted in host memory"] += moved


def _answer(line: Line, digests: dict[str, list[int]]) -> Answer:
    done, request = line.text.output, line.request
    own = tuple(digests.get(request.id, ())[: len(done.token_ids)])
    wants = request.params.prompt_logprobs is not None and bool(done.token_ids)
    return Answer(
        tuple(done.token_ids),
        as_bits(done.logprobs),
        request.metrics,
        own,
        (done.finish_reason, done.stop_reason),
        done.text,
        as_bits(request.prompt_logprobs) if wants else (),
    )


def _count(answers: list[list[Answer]], lines: list[list[Line]], seen: Counter[str]) -> None:
    """What took place, by the requests' own figures."""
    for metrics in (answer.metrics for own in answers for answer in own):
        if not metrics.num_accepted_tokens <= metrics.num_draft_tokens:
            raise WorldError("more drafts were accepted than there were")
        seen["cached tokens"] += metrics.num_cached_tokens
        seen["preemptions"] += metrics.num_preemptions
        seen["drafted"] += metrics.num_draft_tokens
        seen["accepted"] += metrics.num_accepted_tokens
    seen["aborted"] += sum(line.begun for own in lines for line in own)


@contextmanager
def _watched_drafts(engine: Engine, drafter: str, seen: Counter[str]) -> Iterator[None]:
    """Holds a drafter's contract on eager engines: it finds no drafts. Counts uneven steps, whose
    rows get different numbers of drafts."""
    program = engine.runner.program
    inner, drafts = program.drafter, program.table.drafts
    if engine.plan.graph_mode != "none" or not drafts.shape[1]:
        yield
        return

    class Watched:
        def propose(
            self,
            step: Step,
            hidden: Tensor,
            aux_hidden_states: tuple[Tensor, ...],
            verdict: Verdict,
        ) -> None:
            rows = step.row_ids[step.row_ids > 0]
            if bool((drafts[rows] >= 0).any()):
                raise WorldError("a step has left drafts in its rows")
            inner.propose(step, hidden, aux_hidden_states, verdict)
            made = (drafts[rows] >= 0).sum(1)
            seen[f"uneven steps of {drafter}"] += int((made != made[:1]).any())

    program.drafter = Watched()
    try:
        yield
    finally:
        program.drafter = inner


@torch.inference_mode()
def make_dirty(engine: Engine, seed: int) -> None:
    """Fills all memory of rows, pages and state with numbers that mean nothing, but for the null
    row: what nobody has written must not be read."""
    generator = torch.Generator().manual_seed(seed)
    runner, table = engine.runner, engine.runner.table

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
    for tensor in (*runner.paged, *runner.state):
        tensor.copy_(drawn(tensor).to(tensor.device, tensor.dtype))
