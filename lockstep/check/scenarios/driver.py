"""Driver of a scenario: steps an engine, and disturbs its requests in the phases that they name."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lockstep.check.engines import CheckEngine, Completion
from lockstep.check.scenarios.features import FAILURE, Event
from lockstep.check.scenarios.invariants import (
    ANOTHER_ROW,
    CheckedScheduler,
    InvariantError,
    Resumption,
    check_no_prefixes,
)
from lockstep.check.scenarios.saved_rows import checked_returns
from lockstep.check.scenarios.scenario import (
    AFTER_LAUNCH,
    AFTER_PROMPT,
    AT_RESULTS,
    BEFORE_STEP,
    IN_ANSWER,
    IN_FLIGHT,
    IN_HOST_MEMORY,
    IN_PROMPT,
    NO_FAILURE,
    WAITING,
    Limits,
    ScenarioRequest,
)
from lockstep.engine.engine import Engine
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowSpec
from lockstep.step import StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.program import Outcome
from lockstep.worker.step_observer import StepObserver
from lockstep.worker.worker import LaunchedStep

MAX_STEPS = 3000
"""Maximum steps of a scenario; one that takes longer is a failure."""
CROWD = 80
"""Requests that are added and aborted with each arrival under priorities. They are more than a
waiting queue removes without rebuilding itself."""
ABORTED = "aborted completions"
ABORTED_IN_HOST_MEMORY = "completions aborted in host memory"
REUSED_IDS = "ids used again"
FAILED_STEPS = "steps that raised"
OTHER_ROWS = "returns under another row"
"""Names of counters in a report."""


class InjectedError(RuntimeError):
    """Error of a step that a scenario makes raise."""


class FailingStep(StepObserver):
    """Observer that raises once: before or after the launch of a step, counted from 0."""

    def __init__(self, point: str, step: int) -> None:
        self.point = point
        self.step = step
        self.count = 0
        self.has_raised = False

    def before_step(self, rows: list[RowSpec], shape: StepShape) -> None:  # type: ignore[override]
        """Raise InjectedError before this step, if it is the one."""
        self._raise_if(BEFORE_STEP)

    def after_step(  # type: ignore[override]
        self, rows: list[RowSpec], shape: StepShape, outcome: Outcome
    ) -> None:
        """Raise InjectedError after this step is launched, if it is the one."""
        self._raise_if(AFTER_LAUNCH)
        self.count += 1

    def results(self) -> None:
        """Raise InjectedError where results are read, if the step was launched."""
        self._raise_if(AT_RESULTS)

    def _raise_if(self, point: str) -> None:
        if point == self.point and not self.has_raised and self.count >= self.step:
            self.has_raised = True
            raise InjectedError(f"the scenario makes the engine raise {point}")


@dataclass
class Progress:
    """Progress of one completion. index, number: of its request, and among the request's n.

    preempts: phases in which it is still to be preempted. num_preempted: how often it lost its row.
    resumed: its cached prefix. events: features that it really had.
    """

    index: int
    number: int
    request: ScenarioRequest
    completion: Completion
    preempts: list[str] = field(default_factory=list)
    abort: str = ""
    again: bool = False
    num_preempted: int = 0
    preempted_in: list[str] = field(default_factory=list)
    resumed: Resumption | None = None
    events: set[Event] = field(default_factory=set)

    @property
    def id(self) -> str:
        """Return the request id."""
        return self.completion.request.id

    @property
    def has_ended(self) -> bool:
        """Return whether the completion was aborted or finished."""
        return self.completion.aborted or self.completion.request.finish_reason is not None


Remake = Callable[[Progress], Progress]
"""Maker of a second request with the id of an ended one."""


def phase_of(engine: Engine, request_id: str) -> str:
    """Return the phase of a request; "" if it has ended, or has a row and no chunk yet."""
    scheduler = engine.scheduler
    entry = scheduler.entries.get(request_id)
    if entry is None:
        return ""
    if request_id in scheduler.preempted:
        return IN_HOST_MEMORY
    if not entry.row:
        return WAITING
    if entry.in_prompt:
        return IN_PROMPT if entry.has_begun else ""
    if not entry.request.output_token_ids:
        return AFTER_PROMPT
    return "" if entry.will_finish else IN_ANSWER


class Driver:
    """Driver of the requests of one scenario on an engine. events: counters of the report."""

    def __init__(self, engine: CheckEngine, limits: Limits, events: Counter[str]) -> None:
        self.check_engine = engine
        self.engine = engine.engine
        self.events = events
        self.failing = FailingStep(limits.failure, limits.failure_step)
        self.all: list[Progress] = []
        self._latest: dict[str, Progress] = {}
        scheduler = self.engine.scheduler
        assert isinstance(scheduler, CheckedScheduler)
        self.scheduler = scheduler

    def drive(self, completions: list[Progress], remake: Remake) -> None:
        """Step the engine until all completions have ended.

        Raises what the engine raises, and InvariantError.
        """
        waiting = sorted(completions, key=lambda one: one.request.arrival)
        rng = random.Random("crowds")
        with self._failing(), checked_returns(self.engine):
            for step in range(MAX_STEPS):
                num_waiting = len(waiting)
                while waiting and waiting[0].request.arrival <= step:
                    self._add(waiting.pop(0))
                if len(waiting) < num_waiting and self.scheduler.policy == "priority":
                    self._abort_crowd(rng)
                for progress in list(self._latest.values()):
                    self._disturb(progress)
                    if progress.has_ended and progress.again:
                        progress.again = False
                        progress.events.add(("id", "again"))
                        self._record(progress)
                        self._add(remake(progress))
                        self.events[REUSED_IDS] += 1
                if not waiting and not self.engine.has_work():
                    break
                self._step()
                self.engine.scheduler.cache.check()
            else:
                raise InvariantError(f"requests still run after {MAX_STEPS} steps")
        for progress in self._latest.values():
            self._record(progress)

    def _add(self, progress: Progress) -> None:
        self.all.append(progress)
        self._latest[progress.id] = progress
        self.scheduler.returns[progress.id] = progress.request.returns
        for known in (self.scheduler.returned, self.scheduler.resumptions):
            known.pop(progress.id, None)
        self.engine.add(progress.completion.request)

    def _abort_crowd(self, rng: random.Random) -> None:
        """Add requests of random priorities, and abort them before the next schedule.

        The requests that wait must keep their order. Raises InvariantError.
        """
        crowd = [
            Request(f"crowd-{number}", [1], SamplingParams(max_tokens=1), rng.randrange(-3, 4))
            for number in range(CROWD)
        ]
        for request in crowd:
            self.engine.add(request)
        for request in rng.sample(crowd, CROWD):
            if self.engine.abort(request.id) is None:
                raise InvariantError(f"request {request.id} cannot be aborted while it waits")

    def _step(self) -> None:
        """Run one iteration of the engine, and recover from an injected error as a server does."""
        try:
            updated = self.engine.step()
        except InjectedError:
            self.events[FAILED_STEPS] += 1
            for request_id in self.scheduler.begun():
                self._latest[request_id].events.add((FAILURE, self.failing.point))
            for request in self.engine.recover():
                raise InvariantError(f"a failed step ended {request.id}: {request.error}") from None
            check_no_prefixes(self.scheduler.cache)
            return
        for request in updated:
            completion = self._latest[request.id].completion
            # A request that begins again repeats tokens that its client has.
            is_new = len(request.output_token_ids) > len(completion.text.output.token_ids)
            if (is_new or request.finish_reason is not None) and completion.update():
                self.engine.abort(request.id)

    def _disturb(self, progress: Progress) -> None:
        """Preempt or abort a request if it is in the phase for that."""
        if progress.has_ended:
            return
        phase = phase_of(self.engine, progress.id)
        if progress.preempts and phase == progress.preempts[0]:
            progress.preempted_in.append(progress.preempts.pop(0))
            self.engine.scheduler.force_preempt(progress.id)
            return
        entry = self.scheduler.entries.get(progress.id)
        is_unread = entry is not None and entry.row and entry.in_flight > 0
        in_flight = phase in (AFTER_PROMPT, IN_ANSWER) and is_unread
        wanted = progress.abort
        # A request that is still to be preempted is aborted after that.
        if not wanted or progress.preempts:
            return
        if not (phase == wanted or (wanted == IN_FLIGHT and in_flight)):
            return
        in_host_memory = progress.id in worker_of(self.engine).saved
        if self.engine.abort(progress.id) is not None:
            progress.completion.aborted = True
            progress.events.add(("aborted", wanted))
            self.events[ABORTED] += 1
            self.events[ABORTED_IN_HOST_MEMORY] += in_host_memory

    def _record(self, progress: Progress) -> None:
        """Record the features that a request really had, before its id is used again."""
        events = progress.events
        progress.resumed = self.scheduler.resumptions.get(progress.id)
        progress.num_preempted = self.scheduler.num_preempted[progress.id]
        metrics = progress.completion.request.metrics
        if progress.preempted_in == [IN_ANSWER] * 2 and metrics.num_preemptions > 1:
            events.add(("preempted", "twice"))
        elif progress.preempted_in and (
            metrics.num_preemptions or progress.preempted_in == [WAITING]
        ):
            events.add(("preempted", progress.preempted_in[0]))
        ways = self.scheduler.returned.get(progress.id, set())
        events.update(("return", way) for way in ways)
        self.events[OTHER_ROWS] += ANOTHER_ROW in ways

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Make the scenario's step raise in the context."""
        if self.failing.point == NO_FAILURE:
            yield
            return
        worker = worker_of(self.engine)
        collect = worker.collect

        def failing_collect(launched: list[LaunchedStep]) -> Results:
            self.failing.results()
            return collect(launched)

        # The observer comes last: the others have seen a step that raises after its launch.
        with self.check_engine.observed(self.failing):
            worker.collect = failing_collect  # type: ignore[method-assign]
            try:
                yield
            finally:
                del worker.collect
