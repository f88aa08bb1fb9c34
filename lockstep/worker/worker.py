"""Worker: launches the steps of a schedule on one device and reads their results later."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan
from time import perf_counter

import torch
from torch import Tensor, nn

from lockstep.cache.specs import StorageKind
from lockstep.config import Plan
from lockstep.kernels.exchange import ALONE, RankGroup
from lockstep.kernels.sampling import LogitShard
from lockstep.kernels.stream_copies import copy_to_host
from lockstep.outputs import Logprob
from lockstep.scheduling.chunks import FORCED_WINDOWS
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.schedule import (
    MaskedRow,
    PromptChunk,
    Results,
    RowResult,
    RowSpec,
    Schedule,
)
from lockstep.step import StepShape
from lockstep.worker import memory, rows
from lockstep.worker.capture import capture_pieces, capture_program
from lockstep.worker.cpu_threads import with_step_threads
from lockstep.worker.grammar_masks import GrammarMasks
from lockstep.worker.joint_steps import JointSteps
from lockstep.worker.program import Outcome, Program, RunStep, do_nothing
from lockstep.worker.sampler import logprobs
from lockstep.worker.step_observer import StepObserver
from lockstep.worker.step_shapes import (
    forced_shape,
    padded_prompt_step,
    prompt_step,
    shortest_prompt_step,
    uniform_shapes,
)
from lockstep.worker.step_timer import StepTimer
from lockstep.worker.transfers import CopyStream, Transfers

PROMPT_LOGPROB_TILE = 64
"""Positions per logits tile for a prompt's log-probabilities: bounds the memory of [tile, V]."""


@dataclass(frozen=True)
class PlannedStep:
    """A step of a schedule before its launch.

    row_ids, specs: its rows. chunks: the rows' chunks in a prompt step, none in other steps.
    """

    shape: StepShape
    row_ids: list[int]
    specs: list[RowSpec]
    chunks: Sequence[PromptChunk] = ()

    @property
    def columns(self) -> dict[str, list[int]]:
        """Return the columns of the step's host inputs."""
        if not self.shape.prompt:
            return {"row_ids": self.row_ids}
        return {
            "row_ids": self.row_ids,
            "query_lens": [chunk.length for chunk in self.chunks],
            "state_src": [chunk.state_src for chunk in self.chunks],
            "snapshot_slots": [chunk.snapshot_slot for chunk in self.chunks],
        }

    @property
    def num_decided(self) -> int:
        """Return the tokens that the step decides per row."""
        return 1 if self.shape.prompt else self.shape.query_len


@dataclass(frozen=True)
class LaunchedRow:
    """A row of a launched step, with what its results need.

    emits: the row emits tokens; False inside a prompt. logits [Q, V]: copy of the raw logits,
    where the request wants log-probabilities. hidden [N, H]: hidden states of a chunk's positions,
    where it wants prompt log-probabilities; next_tokens [N]: the prompt tokens after them.
    """

    row: int
    spec: RowSpec
    emits: bool
    logits: Tensor | None
    hidden: Tensor | None
    next_tokens: Sequence[int]


@dataclass(frozen=True)
class LaunchedStep:
    """A launched step whose results are on their way to the host.

    timer: of its forward pass and of all steps of that pass. is_joint: the pass has another step.
    """

    rows: list[LaunchedRow]
    shape: StepShape
    results: Tensor
    timer: StepTimer
    is_joint: bool


@dataclass(frozen=True)
class SavedRow:
    """A preempted row in host memory."""

    spec: RowSpec
    host: rows.HostRow


class Worker:
    """Row table, program and cache tensors of one device.

    specs: row -> request data of its latest admission. saved: request id -> preempted row in host
    memory. observers: called around every step of a schedule. num_logit_observers: number of the
    first rank's observers that read logits, equal on every rank: all ranks gather whole logits for
    them. run_step: runs a step; uncaptured: the same without graphs. prompt_buckets: token counts
    that steps of few prompts are padded to. joint_steps: says which decode and prompt steps share a
    forward pass. group: of the tensor-parallel ranks. shard: share of the logits that this rank
    computes.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        draft: nn.Module | None,
        program: Program,
        group: RankGroup = ALONE,
    ) -> None:
        self.plan = plan
        self.group = group
        self.model = model
        self.program = program
        self.table = program.table
        self.layers = memory.mixers(model, draft)
        self.specs: dict[int, RowSpec] = {}
        self.saved: dict[str, SavedRow] = {}
        self.observers: list[StepObserver] = []
        self.num_logit_observers = 0
        self.shard: LogitShard = model.head.logit_shard  # type: ignore[assignment, union-attr]
        longest = max(plan.query_len, FORCED_WINDOWS[-1])
        self.grammar_masks = GrammarMasks(self.table, longest)
        self.uncaptured = RunStep(program.forward, program.decide)
        if plan.device == "cpu":
            self.uncaptured = with_step_threads(self.uncaptured, model)
        self.run_step = self.uncaptured
        self.prompt_buckets = plan.prompt_buckets
        self.joint_steps = JointSteps(plan)
        memory.allocate(self.layers, plan.num_pages, plan.num_slots, plan.device)
        self.paged = memory.tensors(self.layers, StorageKind.PAGED)
        self.state = memory.tensors(self.layers, StorageKind.STATE)
        host = memory.host_memory(plan.host_pages, plan.page_bytes, plan.device)
        self.transfers = Transfers(self.paged, self.state, host, CopyStream(plan.device))

    def warm_up(self, progress: Callable[[int, int], None]) -> dict[tuple[int, int], float]:
        """Run uniform shapes on null rows, and capture them where the plan wants graphs.

        Where whole steps are captured, so are padded prompt steps, see _capture_prompts().
        Returns (rows, drafts) -> ms. On a CPU only the smallest and the largest rows run.
        """
        shapes = self._warm_up_shapes()
        if self.plan.graph_mode != "none":
            pool = torch.cuda.graph_pool_handle()
            if self.plan.graph_mode == "full":
                self.run_step = capture_program(self.uncaptured, pool)
            else:
                capture_pieces(self.model, pool, [s.tokens for s in shapes])
        self.table.inputs.fill()
        # A prompt step compiles the kernels that no uniform step uses.
        self.run_step(shortest_prompt_step(self.plan))
        if self.plan.device == "cuda":
            for window in FORCED_WINDOWS:
                self.run_step(forced_shape(self.plan, 1, window))
        step_ms = {}
        for index, shape in enumerate(shapes):
            if self.plan.device == "cuda":
                self.run_step(shape)  # captures; the next run is timed
            timer = StepTimer(self.plan.device)
            self.run_step(shape)
            timer.end()
            timer.wait()
            step_ms[shape.rows, shape.next_drafts] = timer.ms
            progress(index + 1, len(shapes))
        if self.plan.graph_mode == "full" and self.prompt_buckets:
            self.prompt_buckets = self._capture_prompts()
        return step_ms

    def _capture_prompts(self) -> tuple[int, ...]:
        """Capture padded prompt steps, shortest first -> their token counts.

        The first one that takes the device longer than an eager step's launches take the host ends
        the list, on all ranks. Longer steps run without a graph and without padding: their launches
        cost no time.
        """
        shapes = [padded_prompt_step(self.plan, tokens) for tokens in self.prompt_buckets]
        host_ms = 0.0
        for _ in range(2):  # the first run compiles
            self.table.inputs.fill(query_lens=[shapes[0].tokens])
            began = perf_counter()
            self.uncaptured(shapes[0])
            host_ms = 1000 * (perf_counter() - began)
        captured = []
        for shape in shapes:
            self.table.inputs.fill(query_lens=[shape.tokens])
            self.run_step(shape)
            timer = StepTimer(self.plan.device)
            self.run_step(shape)
            timer.end()
            timer.wait()
            if not smallest(self.group, int(timer.ms < host_ms)):
                break
            captured.append(shape.tokens)
        return tuple(captured)

    @torch.inference_mode()
    def probe(self) -> None:
        """Run the smallest step on null rows and wait for it. Raises what the step raises."""
        self.table.inputs.fill()
        shape = StepShape.uniform(self.plan.row_buckets[0], self.plan.draft_lengths[0] + 1)
        self.run_step(shape)[-1].results.tolist()

    def _warm_up_shapes(self) -> list[StepShape]:
        if self.plan.device == "cuda":
            return uniform_shapes(self.plan)
        buckets = self.plan.row_buckets
        ends = {buckets[0], buckets[-1 if len(self.plan.draft_lengths) > 1 else 0]}
        return uniform_shapes(replace(self.plan, row_buckets=tuple(sorted(ends))))

    @torch.inference_mode()
    def launch(self, schedule: Schedule, fill_masks: FillMasks) -> list[LaunchedStep]:
        """Launch the steps of a schedule without waiting for them.

        fill_masks: answers the mask queries of `schedule.masked`.
        """
        for request_id in schedule.dropped:
            self.saved.pop(request_id, None)
        for answer in schedule.answers:
            for learn in self.program.on_answer:
                learn(answer)
        # Evicted pages are read before any row of this schedule writes them.
        self.transfers.evict(schedule.evicted)
        self._update_rows(schedule)
        masked = {entry.row: entry for entry in schedule.masked}
        *separate, last = self._forward_passes(schedule)
        launched = []
        for steps in separate:
            launched += self._launch(steps, masked, fill_masks)
        # Only the prompt step reads fetched pages, so the passes before it need not wait for them.
        self.transfers.fetch(schedule.fetched)
        return launched + self._launch(last, masked, fill_masks)

    def _forward_passes(self, schedule: Schedule) -> list[list[PlannedStep]]:
        """Return the steps of each forward pass of a schedule. The last pass has the prompt step.

        A pass without steps is not launched.
        """
        uniform = StepShape.uniform(schedule.padded_rows, schedule.num_drafts + 1)
        lengths = [chunk.length for chunk in schedule.prompt]
        joint = None
        if schedule.decode and schedule.prompt:
            joint = self.joint_steps.join(uniform, lengths)
        decode: list[PlannedStep] = []
        forced: list[PlannedStep] = []
        prompt: list[PlannedStep] = []
        if schedule.decode:
            shape = joint[0] if joint else uniform
            decode.append(self._planned(shape, schedule.decode))
        if schedule.forced:
            shape = forced_shape(self.plan, len(schedule.forced), schedule.forced_len)
            forced.append(self._planned(shape, schedule.forced))
        if schedule.prompt:
            shape = joint[1] if joint else prompt_step(self.plan, lengths, self.prompt_buckets)
            row_ids = [chunk.row for chunk in schedule.prompt]
            prompt.append(self._planned(shape, row_ids, schedule.prompt))
        return [forced, decode + prompt] if joint else [decode, forced, prompt]

    def _planned(
        self, shape: StepShape, row_ids: list[int], chunks: Sequence[PromptChunk] = ()
    ) -> PlannedStep:
        return PlannedStep(shape, row_ids, [self.specs[row] for row in row_ids], chunks)

    def _update_rows(self, schedule: Schedule) -> None:
        """Swap rows out and in, admit rows and grant pages, in this order."""
        table = self.table
        for swap in schedule.swap_out:
            host = rows.save_row(table, swap.row, swap.pages, swap.state_slot, self.transfers)
            self.saved[swap.request_id] = SavedRow(self.specs[swap.row], host)
        for swap in schedule.swap_in:
            saved = self.saved.pop(swap.request_id)
            rows.restore_row(
                table, swap.row, saved.host, swap.pages, swap.state_slot, self.transfers
            )
            self.specs[swap.row] = saved.spec
        for admission in schedule.admissions:
            rows.write_row(table, admission.row, admission.spec, admission.start)
            rows.write_pages_and_slot(table, admission.row, admission.pages, admission.state_slot)
            self.specs[admission.row] = admission.spec
        for grant in schedule.grants:
            rows.write_pages(table, grant.row, grant.column, grant.pages)

    def _launch(
        self, steps: list[PlannedStep], masked: dict[int, MaskedRow], fill_masks: FillMasks
    ) -> list[LaunchedStep]:
        """Launch the steps of one forward pass."""
        if not steps:
            return []
        shapes = tuple(step.shape for step in steps)
        # A trace replaces run_step by one that captures nothing.
        if self.run_step is not self.uncaptured and self.joint_steps.needs_capture(shapes):
            self._capture_joint(shapes)
        for inputs, step in zip(self.table.pass_inputs, steps, strict=False):
            inputs.fill(**step.columns)
        timer = StepTimer(self.plan.device)
        before_decide = []
        num_masks = 0
        for step in steps:
            width = step.num_decided
            before = self.grammar_masks.begin(step.row_ids, masked, width, fill_masks, num_masks)
            before_decide.append(before)
            num_masks += len(step.row_ids) * width
        launched = []
        for step, outcome in zip(steps, self._run(steps, before_decide), strict=True):
            launched_rows = self._prompt_rows if step.shape.prompt else self._uniform_rows
            results = copy_to_host(outcome[-1].results[: len(step.row_ids)])
            is_joint = len(steps) > 1
            launched.append(
                LaunchedStep(launched_rows(step, outcome), step.shape, results, timer, is_joint)
            )
        timer.end()
        return launched

    def _capture_joint(self, shapes: tuple[StepShape, ...]) -> None:
        """Capture a joint step on null rows, since capturing a step runs it several times."""
        # If this raises, later steps run without new graphs.
        self.joint_steps.may_capture = False
        decode, prompt = shapes
        for inputs, lengths in zip(self.table.pass_inputs, ([], [prompt.tokens]), strict=True):
            inputs.fill(query_lens=lengths)
        for _ in self.run_step.run(shapes, [do_nothing] * len(shapes)):
            pass
        self.joint_steps.graphs.add((decode, prompt))
        self.joint_steps.may_capture = True

    def _uniform_rows(self, step: PlannedStep, outcome: Outcome) -> list[LaunchedRow]:
        """Return the rows of a step in which each brings its last token, and drafts or forced
        tokens.
        """
        _, _, logits, _ = outcome
        wanted = [spec.params.logprobs is not None for spec in step.specs]
        row_logits = self._copy_logits(wanted, logits, step.shape.query_len)
        rows = zip(step.row_ids, step.specs, row_logits, strict=True)
        return [LaunchedRow(row, spec, True, copied, None, ()) for row, spec, copied in rows]

    def _prompt_rows(self, step: PlannedStep, outcome: Outcome) -> list[LaunchedRow]:
        """Return the rows of a step in which each brings a chunk of its prompt."""
        _, hidden, logits, _ = outcome
        launched = []
        begin = 0
        pairs = zip(step.chunks, step.specs, strict=True)
        wanted = [chunk.last and spec.params.logprobs is not None for chunk, spec in pairs]
        row_logits = self._copy_logits(wanted, logits, 1)
        for chunk, spec, copied in zip(step.chunks, step.specs, row_logits, strict=True):
            row_hidden = None
            next_tokens = spec.prompt_token_ids[:0]
            if spec.params.prompt_logprobs is not None:
                first = chunk.start + 1
                next_tokens = spec.prompt_token_ids[first : first + chunk.length]
                row_hidden = hidden[begin : begin + len(next_tokens)].clone()
            launched.append(
                LaunchedRow(chunk.row, spec, chunk.last, copied, row_hidden, next_tokens)
            )
            begin += chunk.length
        return launched

    def _run(
        self, steps: list[PlannedStep], before_decide: list[Callable[[], None]]
    ) -> Iterator[Outcome]:
        """Run the steps of a forward pass and call the observers. before_decide: see `RunStep`."""
        for step in steps:
            for observer in self.observers:
                observer.before_step(step.specs, step.shape)
        outcomes = self.run_step.run([step.shape for step in steps], before_decide)
        for step, outcome in zip(steps, outcomes, strict=True):
            observed = outcome
            if self.num_logit_observers:
                context, hidden, logits, verdict = outcome
                observed = (context, hidden, self.shard.gather(logits), verdict)
            for observer in self.observers:
                observer.after_step(step.specs, step.shape, observed)
            yield outcome

    def _copy_logits(
        self, wanted: list[bool], logits: Tensor, query_len: int
    ) -> list[Tensor | None]:
        """Copy the whole logits [Q, V] of each row that wants log-probabilities; None for others.

        All ranks have the same rows, so all of them exchange the logits of these rows alone.
        logits [N, n]: this rank's, which the next replay of the step's graph overwrites.
        """
        indices = [i for i, wants in enumerate(wanted) if wants]
        copies: list[Tensor | None] = [None] * len(wanted)
        if indices:
            local = torch.cat([logits[i * query_len : (i + 1) * query_len] for i in indices])
            row_logits = self.shard.gather(local).split(query_len)
            for i, copied in zip(indices, row_logits, strict=True):
                copies[i] = copied
        return copies

    @torch.inference_mode()
    def collect(self, launched: list[LaunchedStep]) -> Results:
        """Wait for the steps of a schedule and read what their rows emitted."""
        results = Results()
        for step in launched:
            step.timer.wait()
            self.group.check()
            if step.shape.is_decode and not step.is_joint:
                results.decode_ms = step.timer.ms
            for row, numbers in zip(step.rows, step.results.tolist(), strict=True):
                result = _read_row(row, numbers) if row.emits else RowResult([])
                result.prompt_logprobs = self._prompt_logprobs(row)
                results.rows[row.row] = result
        return results

    def _prompt_logprobs(self, row: LaunchedRow) -> list[dict[int, Logprob] | None]:
        """Compute the log-probabilities of the tokens after a chunk's positions.

        Empty where the request does not want them; None for a token whose logits are not finite.
        """
        count = row.spec.params.prompt_logprobs
        if row.hidden is None or count is None:
            return []
        scores: list[dict[int, Logprob] | None] = []
        for begin in range(0, len(row.next_tokens), PROMPT_LOGPROB_TILE):
            tokens = list(row.next_tokens[begin : begin + PROMPT_LOGPROB_TILE])
            local = self.program.model.head(row.hidden[begin : begin + len(tokens)])  # type: ignore[attr-defined]
            logits = self.shard.gather(local)
            for entry, token in zip(logprobs(logits, tokens, count), tokens, strict=True):
                scores.append(None if isnan(entry[token].logprob) else entry)
        return scores


def _read_row(row: LaunchedRow, numbers: list[int]) -> RowResult:
    """Return what a row emitted. numbers: its line of a verdict's `results`."""
    *tokens, accepted, drafted, index, chosen = numbers
    tokens = tokens[: accepted + 1]
    mismatch = (index, chosen) if index >= 0 else None
    scores = None
    if row.logits is not None:
        valid = [token for token in tokens if token >= 0]
        scores = logprobs(row.logits[: len(valid)], valid, row.spec.params.logprobs or 0)
    return RowResult(tokens, drafted, accepted, scores, mismatch=mismatch)


def smallest(group: RankGroup, number: int) -> int:
    """Return the minimum of a number over the ranks of a group, on GPUs."""
    if group.size == 1:
        return number
    return int(group.all_gather(torch.tensor([number], device="cuda")).min())
