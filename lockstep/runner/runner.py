"""The runner: launches schedules, one step ahead of the host, and reads results one step late."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan

import torch
from torch import Tensor, nn

from lockstep.cache.specs import PagedSpec, StateSpec
from lockstep.config import Plan
from lockstep.runner import memory, rows
from lockstep.runner.capture import capture_pieces, capture_program
from lockstep.runner.program import Outcome, Program
from lockstep.runner.sampler import logprobs
from lockstep.runner.step_timer import StepTimer
from lockstep.runner.threads import by_work
from lockstep.scheduling.draft_length import DraftLengthPolicy, FixedDraftLength
from lockstep.scheduling.request import Request
from lockstep.scheduling.scheduler import PromptChunk, RowResult, Schedule
from lockstep.step import Step, StepShape

PROMPT_LOGPROB_TILE = 64


@dataclass
class Launch:
    """One launched step whose results are still on their way to the host. made: drafts that were
    made for it, where it brings any."""

    requests: list[Request]
    emits: list[bool]
    shape: StepShape
    results: Tensor
    logits: dict[int, Tensor]
    timer: StepTimer
    made: int = 0


@dataclass
class Flight:
    """One launched schedule: its steps, not yet read."""

    launches: list[Launch] = field(default_factory=list)


class Runner:
    """Owns table, program and cache tensors. `last_step` is the latest step, for tracing; `drafts`
    says how many a step brings, and `made` how many the latest step has made for the next.
    `run_step` runs a step; `uncaptured`, without graphs."""

    def __init__(
        self, plan: Plan, model: nn.Module, draft: nn.Module | None, program: Program
    ) -> None:
        self.plan, self.model, self.program, self.table = plan, model, program, program.table
        self.layers = memory.mixers(model, draft)
        self.saved: dict[str, rows.HostRow] = {}
        self.last_step: Step | None = None
        self.drafts: DraftLengthPolicy = FixedDraftLength(plan.draft_lengths[-1])
        self.made = 0
        self.uncaptured: Callable[[StepShape], Outcome] = program.run_step
        if plan.device == "cpu":
            self.uncaptured = by_work(program.run_step, model)
        self.run_step = self.uncaptured
        memory.allocate(self.layers, plan.num_pages, plan.num_slots, plan.device)
        self.paged = memory.tensors(self.layers, PagedSpec)
        self.state = memory.tensors(self.layers, StateSpec)

    def warm_up(self, progress: Callable[[int, int], None]) -> dict[tuple[int, int], float]:
        """Runs every uniform shape on null rows, capturing it if the plan asks for graphs.

        Returns (rows, drafts) -> ms. Without graphs the ends of both ranges say enough.
        """
        shapes = self._uniform_shapes()
        if self.plan.graph_mode != "none":
            pool = torch.cuda.graph_pool_handle()
            if self.plan.graph_mode == "full":
                self.run_step = capture_program(self.program.run_step, pool)
            else:
                capture_pieces(self.model, pool, [s.tokens for s in shapes])
        self.table.inputs.fill()
        size = min(memory.PAGE_SIZE, self.plan.max_model_len)
        self.run_step(StepShape(1, size, size, prompt=True, drafts=self.plan.query_len - 1))
        taken = {}
        for index, shape in enumerate(shapes):
            if self.plan.device == "cuda":
                self.run_step(shape)
            timer = StepTimer(self.plan.device)
            self.run_step(shape)
            timer.end()
            timer.wait()
            taken[shape.rows, shape.drafts] = timer.ms
            progress(index + 1, len(shapes))
        return taken

    @torch.inference_mode()
    def probe(self) -> None:
        """Runs the smallest step on null rows and waits for it. Raises what it raises."""
        self.table.inputs.fill()
        shape = StepShape.uniform(self.plan.row_buckets[0], self.plan.draft_lengths[0] + 1)
        self.run_step(shape)[-1].results.tolist()

    def _uniform_shapes(self) -> list[StepShape]:
        """The largest first."""
        buckets, counts = self.plan.row_buckets, self.plan.draft_lengths
        if self.plan.device != "cuda":
            buckets = tuple(sorted({buckets[0], buckets[-1 if len(counts) > 1 else 0]}))
        return [StepShape.uniform(r, k + 1) for r in reversed(buckets) for k in reversed(counts)]

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> Flight:
        """Puts a schedule on the device. Does not wait for it."""
        self._place(schedule)
        flight = Flight()
        if schedule.decode:
            flight.launches.append(self._launch_decode(schedule.decode))
        if schedule.prompt:
            flight.launches.append(self._launch_prompt(schedule.prompt))
        return flight

    def _place(self, schedule: Schedule) -> None:
        """Moves, admits and grants, in the order of the schedule."""
        table = self.table
        for swap in schedule.swap_out:
            self.saved[swap.request.id] = rows.save_row(
                table, swap.row, swap.pages, swap.state_slot, self.paged, self.state
            )
        for swap in schedule.swap_in:
            saved = self.saved.pop(swap.request.id)
            place = (swap.pages, swap.state_slot, self.paged, self.state)
            rows.restore_row(table, swap.row, saved, *place)
        for admission in schedule.admissions:
            rows.write_row(table, admission.row, admission.request, admission.start)
            rows.write_place(table, admission.row, admission.pages, admission.state_slot)
        for grant in schedule.grants:
            rows.write_pages(table, grant.row, grant.column, grant.pages)

    def _launch_decode(self, decode: list[tuple[int, Request]]) -> Launch:
        bucket = next(b for b in self.plan.row_buckets if b >= len(decode))
        self.table.inputs.fill(row_ids=[row for row, _ in decode])
        requests = [request for _, request in decode]
        count = self.drafts.choose(bucket)
        launch = self._run(StepShape.uniform(bucket, count + 1), requests)
        launch.made, self.made = min(count, self.made), count
        return launch

    def _launch_prompt(self, chunks: list[PromptChunk]) -> Launch:
        lengths = [c.length for c in chunks]
        self.table.inputs.fill(
            row_ids=[c.row for c in chunks],
            query_lens=lengths,
            state_src=[c.state_src for c in chunks],
            snapshot_slots=[c.snapshot_slot for c in chunks],
        )
        most = self.plan.query_len - 1
        shape = StepShape(len(chunks), sum(lengths), max(lengths), prompt=True, drafts=most)
        launch = self._run(shape, [c.request for c in chunks])
        launch.emits = [c.last for c in chunks]
        return launch

    def _run(self, shape: StepShape, requests: list[Request]) -> Launch:
        timer = StepTimer(self.plan.device)
        step, hidden, logits, verdict = self.run_step(shape)
        self.last_step = step
        count, window = len(requests), verdict.tokens.shape[1]
        cuda = self.plan.device == "cuda"
        results = torch.empty(count, window + 2, dtype=torch.int64, pin_memory=cuda)
        results.copy_(verdict.results[:count], non_blocking=True)
        wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
        kept = {i: logits[i * window : (i + 1) * window].clone() for i in wanted}
        if shape.prompt:
            self._prompt_logprobs(step, hidden, requests)
        timer.end()
        return Launch(requests, [True] * count, shape, results, kept, timer)

    def _prompt_logprobs(self, step: Step, hidden: Tensor, requests: list[Request]) -> None:
        """For requests that ask: the log-probabilities of their prompt tokens, chunk by chunk.

        None where logits that are no numbers give none.
        """
        for i, request in enumerate(requests):
            most = request.params.prompt_logprobs
            if most is None:
                continue
            begin, end = step.cu_seqlens[i : i + 2].tolist()
            first = int(step.starts[i])
            following = request.prompt_token_ids[first + 1 : first + 1 + end - begin]
            for tile in range(0, len(following), PROMPT_LOGPROB_TILE):
                tokens = following[tile : tile + PROMPT_LOGPROB_TILE]
                at = begin + tile
                logits = self.program.model.head(hidden[at : at + len(tokens)])  # type: ignore[attr-defined]
                found = zip(logprobs(logits, tokens, most), tokens, strict=True)
                request.prompt_logprobs.extend(
                    None if isnan(entry[token].logprob) else entry for entry, token in found
                )

    def collect(self, flight: Flight) -> dict[str, RowResult]:
        """Waits for a flight and reads what its rows emitted, by request id."""
        found: dict[str, RowResult] = {}
        for launch in flight.launches:
            launch.timer.wait()
            lines = launch.results.tolist()
            for i, line in enumerate(lines):
                if launch.emits[i]:
                    found[launch.requests[i].id] = self._result(launch, i, line)
            if not launch.shape.prompt:
                accepted, shape = [line[-2] for line in lines], launch.shape
                self.drafts.observe(
                    shape.rows, shape.drafts, launch.made, accepted, launch.timer.ms
                )
        return found

    def _result(self, launch: Launch, index: int, line: list[int]) -> RowResult:
        *tokens, accepted, drafted = line
        tokens = tokens[: accepted + 1]
        scores = None
        if index in launch.logits:
            most = launch.requests[index].params.logprobs or 0
            real = [token for token in tokens if token >= 0]
            scores = logprobs(launch.logits[index][: len(real)], real, most)
        return RowResult(tokens, drafted, accepted, scores)

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a preempted request that was aborted."""
        self.saved.pop(request_id, None)
