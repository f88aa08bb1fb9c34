"""The runner: launches schedules, one step ahead of the host, and reads results one step late."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan

import torch
from torch import Tensor, nn

from lockstep.cache.specs import Law
from lockstep.config import Plan, StepLimits
from lockstep.kernels.stream_copies import copy_to_host
from lockstep.outputs import Logprob
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import PromptChunk, Results, RowResult, Schedule
from lockstep.step import PAGE_SIZE, StepShape
from lockstep.worker import memory, rows
from lockstep.worker.capture import capture_halves, capture_pieces
from lockstep.worker.cpu_threads import by_work
from lockstep.worker.grammar_masks import GrammarMasks
from lockstep.worker.program import Outcome, Program, RunStep
from lockstep.worker.sampler import logprobs
from lockstep.worker.step_observer import StepObserver
from lockstep.worker.step_timer import StepTimer
from lockstep.worker.transfers import CopyStream, Transfers

PROMPT_LOGPROB_TILE = 64
"""Positions whose logits are made at once where a prompt's log-probabilities are wanted."""


def uniform_shapes(limits: StepLimits) -> list[StepShape]:
    """Return the shapes of steps without prompt tokens, the largest first: a graph for each."""
    return [
        StepShape.uniform(rows, drafts + 1)
        for rows in reversed(limits.row_buckets)
        for drafts in reversed(limits.draft_lengths)
    ]


@dataclass(frozen=True)
class RowInFlight:
    """A row of a launched step, and what is kept of it until its results are read.

    emits: whether it gives tokens: not in the middle of a prompt. logits [Q, V]: raw, where the
    request asks for log-probabilities. hidden [N, H]: of the chunk's positions, where it asks for
    those of its prompt; following [N]: the tokens behind them.
    """

    row: int
    request: Request
    emits: bool
    logits: Tensor | None
    hidden: Tensor | None
    following: Sequence[int]


@dataclass(frozen=True)
class InFlightStep:
    """A launched step whose results are still on their way to the host: tensors of its rows."""

    rows: list[RowInFlight]
    shape: StepShape
    results: Tensor
    timer: StepTimer


@dataclass(frozen=True)
class SavedRow:
    """A preempted row: its request, and what the device held of it."""

    request: Request
    host: rows.HostRow


class Runner:
    """Owns table, program and cache tensors. Knows of a request what it was admitted with.

    requests: row -> the request that has it, or had it last. saved: id of a preempted request ->
    its row in host memory. observers: see every step that a schedule launches. `run_step` runs a
    step; `uncaptured`, without graphs.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, draft: nn.Module | None, program: Program
    ) -> None:
        self.plan = plan
        self.model = model
        self.program = program
        self.table = program.table
        self.layers = memory.mixers(model, draft)
        self.requests: dict[int, Request] = {}
        self.saved: dict[str, SavedRow] = {}
        self.observers: list[StepObserver] = []
        self.grammar_masks = GrammarMasks(self.table, plan.query_len)
        self.uncaptured = RunStep(program.forward, program.decide)
        if plan.device == "cpu":
            self.uncaptured = by_work(self.uncaptured, model)
        self.run_step = self.uncaptured
        memory.allocate(self.layers, plan.num_pages, plan.num_slots, plan.device)
        self.paged = memory.tensors(self.layers, Law.PAGED)
        self.state = memory.tensors(self.layers, Law.STATE)
        host = memory.host_memory(plan.host_pages, plan.page_bytes, plan.device)
        self.transfers = Transfers(self.paged, self.state, host, CopyStream(plan.device))

    def warm_up(self, progress: Callable[[int, int], None]) -> dict[tuple[int, int], float]:
        """Runs every uniform shape on null rows, capturing it if the plan asks for graphs.

        Returns (rows, drafts) -> ms. Without graphs the ends of both ranges say enough.
        """
        shapes = self._uniform_shapes()
        if self.plan.graph_mode != "none":
            pool = torch.cuda.graph_pool_handle()
            if self.plan.graph_mode == "full":
                self.run_step = capture_halves(self.uncaptured, pool)
            else:
                capture_pieces(self.model, pool, [s.tokens for s in shapes])
        self.table.inputs.fill()
        size = min(PAGE_SIZE, self.plan.max_model_len)
        self.run_step(StepShape(1, size, size, prompt=True, next_drafts=self.plan.query_len - 1))
        taken = {}
        for index, shape in enumerate(shapes):
            if self.plan.device == "cuda":
                self.run_step(shape)
            timer = StepTimer(self.plan.device)
            self.run_step(shape)
            timer.end()
            timer.wait()
            taken[shape.rows, shape.next_drafts] = timer.ms
            progress(index + 1, len(shapes))
        return taken

    @torch.inference_mode()
    def probe(self) -> None:
        """Runs the smallest step on null rows and waits for it. Raises what it raises."""
        self.table.inputs.fill()
        shape = StepShape.uniform(self.plan.row_buckets[0], self.plan.draft_lengths[0] + 1)
        self.run_step(shape)[-1].results.tolist()

    def _uniform_shapes(self) -> list[StepShape]:
        if self.plan.device == "cuda":
            return uniform_shapes(self.plan)
        buckets = self.plan.row_buckets
        ends = {buckets[0], buckets[-1 if len(self.plan.draft_lengths) > 1 else 0]}
        return uniform_shapes(replace(self.plan, row_buckets=tuple(sorted(ends))))

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> list[InFlightStep]:
        """Puts a schedule on the device. Does not wait for it."""
        self.transfers.evict(schedule.evicted)
        self._place(schedule)
        launched = []
        if schedule.decode:
            launched.append(self._launch_decode(schedule))
        self.transfers.fetch(schedule.fetched)
        if schedule.prompt:
            launched.append(self._launch_prompt(schedule.prompt))
        return launched

    def _place(self, schedule: Schedule) -> None:
        """Moves, admits and grants, in the order of the schedule."""
        table = self.table
        for swap in schedule.swap_out:
            place = (swap.pages, swap.state_slot)
            host = rows.save_row(table, swap.row, *place, self.transfers)
            self.saved[swap.request_id] = SavedRow(self.requests[swap.row], host)
        for swap in schedule.swap_in:
            saved = self.saved.pop(swap.request_id)
            place = (swap.pages, swap.state_slot)
            rows.restore_row(table, swap.row, saved.host, *place, self.transfers)
            self.requests[swap.row] = saved.request
        for admission in schedule.admissions:
            rows.write_row(table, admission.row, admission.request, admission.start)
            rows.write_place(table, admission.row, admission.pages, admission.state_slot)
            self.requests[admission.row] = admission.request
        for grant in schedule.grants:
            rows.write_pages(table, grant.row, grant.column, grant.pages)

    def _launch_decode(self, schedule: Schedule) -> InFlightStep:
        """The uniform step: every row brings its last token and as many drafts."""
        self.table.inputs.fill(row_ids=schedule.decode)
        shape = StepShape.uniform(schedule.padded_rows, schedule.num_drafts + 1)
        requests = [self.requests[row] for row in schedule.decode]
        timer = StepTimer(self.plan.device)
        between = self.grammar_masks.begin(schedule.decode, requests, shape.query_len)
        _, _, logits, verdict = self._run(requests, shape, between)
        window = shape.query_len
        flying = [
            RowInFlight(row, request, True, _wanted(request, logits, i, window), None, ())
            for i, (row, request) in enumerate(zip(schedule.decode, requests, strict=True))
        ]
        results = copy_to_host(verdict.results[: len(flying)])
        timer.end()
        return InFlightStep(flying, shape, results, timer)

    def _launch_prompt(self, chunks: list[PromptChunk]) -> InFlightStep:
        """The ragged step: every row brings a chunk of its prompt."""
        lengths = [chunk.length for chunk in chunks]
        self.table.inputs.fill(
            row_ids=[chunk.row for chunk in chunks],
            query_lens=lengths,
            state_src=[chunk.state_src for chunk in chunks],
            snapshot_slots=[chunk.snapshot_slot for chunk in chunks],
        )
        shape = StepShape(
            rows=len(chunks),
            tokens=sum(lengths),
            query_len=max(lengths),
            prompt=True,
            next_drafts=self.plan.query_len - 1,
        )
        requests = [self.requests[chunk.row] for chunk in chunks]
        timer = StepTimer(self.plan.device)
        emitting = [r if chunk.last else None for r, chunk in zip(requests, chunks, strict=True)]
        between = self.grammar_masks.begin([chunk.row for chunk in chunks], emitting, width=1)
        _, hidden, logits, verdict = self._run(requests, shape, between)
        flying = []
        begin = 0
        for i, (chunk, request) in enumerate(zip(chunks, requests, strict=True)):
            logit_rows = _wanted(request, logits, i, 1) if chunk.last else None
            kept = None
            following = request.prompt_token_ids[:0]
            if request.params.prompt_logprobs is not None:
                first = chunk.start + 1
                following = request.prompt_token_ids[first : first + chunk.length]
                kept = hidden[begin : begin + len(following)].clone()
            flying.append(RowInFlight(chunk.row, request, chunk.last, logit_rows, kept, following))
            begin += chunk.length
        results = copy_to_host(verdict.results)
        timer.end()
        return InFlightStep(flying, shape, results, timer)

    def _run(
        self, requests: list[Request], shape: StepShape, between: Callable[[], None]
    ) -> Outcome:
        """Runs a step of these requests, watched by the observers. between: see RunStep."""
        for observer in self.observers:
            observer.before_step(requests, shape)
        outcome = self.run_step(shape, between)
        for observer in self.observers:
            observer.after_step(requests, shape, outcome)
        return outcome

    @torch.inference_mode()
    def collect(self, launched: list[InFlightStep]) -> Results:
        """Waits for a schedule's steps and reads what their rows emitted."""
        found = Results()
        for step in launched:
            step.timer.wait()
            if not step.shape.prompt:
                found.decode_ms = step.timer.ms
            for row, numbers in zip(step.rows, step.results.tolist(), strict=True):
                result = _result(row, numbers) if row.emits else RowResult([])
                result.prompt_logprobs = self._prompt_logprobs(row)
                found.rows[row.row] = result
        return found

    def _prompt_logprobs(self, row: RowInFlight) -> list[dict[int, Logprob] | None]:
        """Log-probabilities of the tokens behind a chunk's positions, for requests that ask.

        None where logits that are no numbers give none.
        """
        most = row.request.params.prompt_logprobs
        if row.hidden is None or most is None:
            return []
        scores: list[dict[int, Logprob] | None] = []
        for begin in range(0, len(row.following), PROMPT_LOGPROB_TILE):
            tokens = list(row.following[begin : begin + PROMPT_LOGPROB_TILE])
            logits = self.program.model.head(row.hidden[begin : begin + len(tokens)])  # type: ignore[attr-defined]
            for entry, token in zip(logprobs(logits, tokens, most), tokens, strict=True):
                scores.append(None if isnan(entry[token].logprob) else entry)
        return scores

    def finish(self, request: Request) -> None:
        """A request has come to its end. Drafters may learn from its answer, but not where a
        cache_salt keeps it apart: what others are drafted would tell of it, by its time."""
        self.forget(request.id)
        if request.cache_salt:
            return
        for learn in self.program.on_answer:
            learn(request.output_token_ids)

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a preempted request that was aborted."""
        self.saved.pop(request_id, None)


def _wanted(request: Request, logits: Tensor, index: int, window: int) -> Tensor | None:
    """A copy of the logits [window, V] of a step's row, where log-probabilities are asked for."""
    if request.params.logprobs is None:
        return None
    return logits[index * window : (index + 1) * window].clone()


def _result(row: RowInFlight, numbers: list[int]) -> RowResult:
    """What a row emitted, from its numbers in a verdict's results: tokens, accepted, drafted."""
    *tokens, accepted, drafted = numbers
    tokens = tokens[: accepted + 1]
    scores = None
    if row.logits is not None:
        real = [token for token in tokens if token >= 0]
        scores = logprobs(row.logits[: len(real)], real, row.request.params.logprobs or 0)
    return RowResult(tokens, drafted, accepted, scores)
