"""The worlds section: random worlds are drawn and played, and what differs is made small."""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from lockstep.check.answers import NO_ENDING
from lockstep.check.drafters import NONE
from lockstep.check.draw import EARLY, WORLDS_OF_A_KIND, Drawer
from lockstep.check.harness import CheckEngine
from lockstep.check.matrix import WORLD, Setup
from lockstep.check.plain import PlainRuns
from lockstep.check.report import Failure, Report, Tally
from lockstep.check.shard import WHOLE, Shard
from lockstep.check.shrink import minimise
from lockstep.check.stage import Stage
from lockstep.check.trace import compare, traced
from lockstep.check.world import Kind, World, write_world
from lockstep.errors import LockstepError

Progress = Callable[[str, int, int], None]
Build = Callable[[Kind], CheckEngine]
AXES = ("cached tokens", "preemptions", "drafted", "accepted")
FROM_HOST = "pages from host memory"
"""What has to take place in worlds; the last, where some are made for it."""


@dataclass(frozen=True)
class Difference:
    """Where a world's answer is not the plain one. request, completion: which; None: the engine
    itself gave up. plain: the plain run is wrong by itself; refused: by an error of Lockstep's own.
    """

    request: int | None
    completion: int
    position: int | None
    what: str
    plain: bool = False
    refused: bool = False


@dataclass
class Examined:
    """What one world showed."""

    difference: Difference | None
    answers: int
    seen: Counter[str]


class Examiner:
    """Compares worlds with plain runs; keeps the engine of the last kind."""

    def __init__(self, plain: PlainRuns, build: Build) -> None:
        self.plain = plain
        self.build = build
        self._stage: Stage | None = None

    def stage(self, kind: Kind) -> Stage:
        """An engine of this kind."""
        if self._stage is None or self._stage.kind != kind:
            self._stage = None
            gc.collect()
            self._stage = Stage(self.build(kind), kind)
        return self._stage

    def examine(self, world: World) -> Examined:
        """Plays a world. Whatever the engine raises is a difference too."""
        found = self._wrong_plain(world)
        if found is not None:
            return Examined(found, 1, Counter())
        try:
            played = self.stage(world.kind).play(world, self.plain)
        except Exception as error:  # an engine that breaks has not given the plain answer
            self._stage = None
            what = f"raised {type(error).__name__}: {error}"
            refused = isinstance(error, LockstepError)
            return Examined(Difference(None, 0, None, what, refused=refused), 1, Counter())
        count = sum(len(own) for own in played.answers)
        for index, (own, given) in enumerate(zip(played.answers, world.requests, strict=True)):
            due = self.plain.answers(given.prompt, world.alone(given))
            for completion, answer in enumerate(own):
                begun = answer.ending == NO_ENDING
                found_here = answer.first_difference(due[completion], begun)
                if found_here is not None:
                    difference = Difference(index, completion, *found_here)
                    return Examined(difference, count, played.seen)
        return Examined(None, count, played.seen)

    def differs(self, world: World) -> bool:
        """Whether this world differs. One that the engine or a parameter refuses does not."""
        found = self.examine(world).difference
        return found is not None and not found.refused

    def _wrong_plain(self, world: World) -> Difference | None:
        for index, given in enumerate(world.requests):
            try:
                fault = self.plain.judged(given.prompt, world.alone(given))
            except Exception as error:
                what = f"the plain run raised {type(error).__name__}: {error}"
                refused = isinstance(error, LockstepError)
                return Difference(index, 0, None, what, plain=True, refused=refused)
            if fault is not None:
                what = f"the plain run itself: {fault.what}"
                return Difference(index, fault.completion, fault.position, what, plain=True)
        return None


@dataclass(frozen=True)
class Effort:
    """How much is done. worlds: how many are drawn; seconds: instead of that, for how long;
    minimise: seconds to make the first difference small; folder: where it is written, if anywhere;
    fail_fast: whether the check ends with its first difference; shard: which one is done here.
    """

    worlds: int
    seconds: float | None = None
    minimise: float = 60.0
    folder: Path | None = None
    fail_fast: bool = False
    shard: Shard = WHOLE

    @property
    def worlds_due(self) -> int | None:
        """Worlds of the shard; None where time decides."""
        if self.seconds is not None:
            return None
        return sum(self.shard.has(index // WORLDS_OF_A_KIND) for index in range(self.worlds))


def run_worlds(
    drawer: Drawer, examiner: Examiner, effort: Effort, report: Report, progress: Progress
) -> None:
    """Draws and plays worlds, and adds to the report."""
    started = time.monotonic()
    axes: tuple[str, ...] = AXES
    for index in count():
        passed = time.monotonic() - started
        if passed >= effort.seconds if effort.seconds is not None else index >= effort.worlds:
            break
        if not effort.shard.has(index // WORLDS_OF_A_KIND):
            continue
        progress(f"world {index}", index, 0 if effort.seconds is not None else effort.worlds)
        began = time.monotonic()
        try:
            world = drawer.world(index)
        except Exception as error:  # worlds aim by plain runs: the plain engine itself breaks
            what = f"the plain run raised {type(error).__name__}: {error}"
            setup = Setup(NONE, 0, WORLD, "none")
            report.fail(setup, f"world {index} of seed {drawer.seed}", what, "a plain run")
            return
        found = examiner.examine(world)
        axes = (*AXES, FROM_HOST) if drawer.wants_host(index) else axes
        if report.used is not None:
            for given in world.requests:
                report.used.params(given.sampling())
        seconds = round(time.monotonic() - began, 2)
        failed = int(found.difference is not None)
        report.add(Tally(setup_of(world), found.answers, failed, seconds, f"world {index}"))
        report.count(found.seen)
        if found.difference is not None:
            name = f"world {index} of seed {drawer.seed}"
            first = not any(f.setup.phase == WORLD for f in report.failures)
            file = f"lockstep-check-{drawer.seed}-{index}.json" if first else None
            _add_difference(report, world, found.difference, examiner, effort, name, file)
        if failed and effort.fail_fast:
            return
    if sum(tally.setup.phase == WORLD for tally in report.tallies) >= EARLY:
        _check_exercised(report, axes)


def _add_difference(
    report: Report,
    world: World,
    difference: Difference,
    examiner: Examiner,
    effort: Effort,
    name: str,
    file: str | None,
) -> None:
    """Adds a failure at once; where a file is named, it is explained then, which takes long."""
    as_found = replace(effort, minimise=0.0)
    report.failures.append(explain(world, difference, examiner, as_found, name, file))
    if file is not None and effort.minimise > 0:
        report.failures[-1] = explain(world, difference, examiner, effort, name, file)


def _check_exercised(report: Report, axes: tuple[str, ...]) -> None:
    """An axis that never took place proves nothing: that is a failure too."""
    for name in axes:
        if not report.exercised.get(name):
            report.fail(Setup(NONE, 0, WORLD, "none"), "all", f"no {name} at all")


def setup_of(world: World) -> Setup:
    """The world's engine, as the report names engines."""
    kind = world.kind
    return Setup(kind.drafter, kind.drafts, WORLD, kind.graph, kind.changing)


def explain(
    world: World,
    difference: Difference,
    examiner: Examiner,
    effort: Effort,
    name: str,
    file: str | None,
) -> Failure:
    """A failure of a world; where a file is named, of the world made small, written and traced."""
    where = None
    if file is not None and effort.minimise > 0:
        world = minimise(world, lambda w: examiner.differs(w), effort.minimise)
        difference = examiner.examine(world).difference or difference
        where = locate(world, difference, examiner)
    written = None
    if file is not None and effort.folder is not None:
        path = effort.folder / file
        write_world(path, world, what=difference.what, found=name)
        written = str(path)
    request = "every request"
    sampling = "all"
    if difference.request is not None:
        given = world.requests[difference.request]
        request = f"request {difference.request + 1} of {len(world.requests)}"
        request += f", a prompt of {len(given.prompt)} tokens"
        sampling = ", ".join(given.params)
    return Failure(
        setup_of(world), name, request, sampling, difference.position, difference.what, where,
        written,
    )  # fmt: skip


def locate(world: World, difference: Difference, examiner: Examiner) -> str | None:
    """The first layer and op that differ, found by playing the world again, traced."""
    if difference.request is None or difference.position is None or difference.plain:
        return None
    given = world.requests[difference.request]
    which = f"-{difference.completion}" if given.params.get("n", 1) > 1 else ""
    own_id = f"r{difference.request}{which}"
    plain_id = f"plain-1{which}"
    end = len(given.prompt) + difference.position
    eager = replace(world, kind=replace(world.kind, graph="none"))
    fresh = PlainRuns(examiner.plain.engine)
    with traced(fresh.engine, lambda row: row.id == plain_id) as due:
        fresh.answers(given.prompt, world.alone(given))
    try:
        stage = examiner.stage(eager.kind)
        with traced(stage.engine, lambda row: row.id == own_id) as trace:
            stage.play(eager, examiner.plain)
    except Exception as error:
        return f"run again, watched, it raised {type(error).__name__}: {error}"
    found = compare(due, trace, end)
    return found or "no module of the model differs when run eagerly: look at the sampler"


def replay(world: World, examiner: Examiner, report: Report) -> None:
    """Plays one world of a file, and adds to the report."""
    found = examiner.examine(world)
    failed = int(found.difference is not None)
    report.add(Tally(setup_of(world), found.answers, failed, 0.0, "replayed world"))
    report.exercised = dict(found.seen)
    if found.difference is not None:
        keep = Effort(worlds=1, minimise=0.0)
        failure = explain(world, found.difference, examiner, keep, "replayed world", None)
        report.failures.append(failure)
        where = locate(world, found.difference, examiner)
        report.failures[-1] = replace(failure, where=where)
