"""Examination of one backend of an op in the current process, which a sick kernel may end.

Every check is announced before it runs, so that the parent knows what a crash or a hang was in.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from lockstep.doctor.cases import Case, cases_of, kinds_of
from lockstep.kernels.arguments import Arguments, fresh, outputs, same_bits, tensors_of
from lockstep.kernels.backends import all_ops
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.canaries import Canaries
from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.registry import Op
from lockstep.kernels.row_subsets import ROWS, count_rows, take_rows
from lockstep.kernels.selection import NUMBA
from lockstep.kernels.timing import REPEATS, seconds_per_call
from lockstep.layers.build_context import KernelNeed

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative tolerance of a GPU's and of Numba's numbers against the reference's. The other backends
of a CPU have its bits."""
CHOSEN_IDS = ("sample", "route")
"""Ops that choose an id by comparing numbers, so that one ulp may change a choice."""
MAX_OTHER_IDS = 0.02
"""Share of ids of CHOSEN_IDS that may differ from the reference's on a GPU."""
QUANTIZING = ("quantize_silu_mul", "quantize_add_rms_norm")
"""Ops that quantize numbers which they compute, so that one ulp may change an e4m3 code."""
CODE_TOLERANCE = 0.125
"""Relative tolerance of the codes of QUANTIZING: the distance of neighbours, of 3 mantissa bits."""
CALLS = {"cuda": 8, "cpu": 2}
"""Calls in a row, without a wait between them, whose bits are compared."""
LOADED_CALLS = 20
"""Calls under the load of a second stream."""
REPEATED = {"cuda": 40, "cpu": 3}
"""Repetitions of all rows in the largest batch: on a GPU more than a tile has rows."""
FILLS = (255, 0)
"""Bytes of new memory in the check of bounds. The first call may have had memory with one of them.
"""
LOAD_SIZE = 4096
"""Rows and columns of the product that the second stream computes."""
LOAD_DEPTH = 16384
"""Length of its sums: the product takes 0.8 ms of an H200, longer than a host takes for a call."""
ASYNCHRONOUS = "asynchronous"
BLOCKING = "blocking"


@dataclass(frozen=True)
class Job:
    """Examination of one backend of an op for the needs of a model.

    device: cpu or cuda. mode: ASYNCHRONOUS or BLOCKING launches. imports: modules that add backends
    or replace them, imported first. timed: measure the time of a call only.
    """

    op: str
    backend: str
    device: str
    needs: tuple[KernelNeed, ...]
    mode: str = ASYNCHRONOUS
    imports: tuple[str, ...] = ()
    timed: bool = False


@dataclass(frozen=True)
class Stage:
    """Check of one case that begins."""

    check: str
    case: str


@dataclass(frozen=True)
class Fault:
    """Finding of a check. kind: one of KINDS of lockstep.doctor.children."""

    kind: str
    stage: Stage
    detail: str


@dataclass(frozen=True)
class Done:
    """End of an examination. us: case name -> microseconds of a call, of a timed job."""

    checks: int
    us: dict[str, float] = field(default_factory=dict)


class BrokenProcessError(Exception):
    """Error after which the process cannot examine anything else."""


def run_job(job: Job, connection: Connection, log: str) -> None:
    """Examine a backend and send Stages, Faults and Done. The main function of a child process.

    log: file that receives the output of the process.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if job.mode == BLOCKING:
        # CUDA has no other switch, and reads this one when it is initialized, which no import does.
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    torch.set_num_threads(1)
    load_backends()
    for name in job.imports:
        import_module(name)
    examiner = Examiner(job, connection.send)
    try:
        with torch.inference_mode():
            done = examiner.time() if job.timed else examiner.examine()
        connection.send(done)
    except BrokenProcessError:
        pass
    connection.close()


class Examiner:
    """Checks of one backend. send: delivers Stages and Faults to the parent."""

    def __init__(self, job: Job, send: Callable[[Any], None]) -> None:
        self.job = job
        self.send = send
        self.op: Op = all_ops()[job.op]
        self.backend = self.op.backends[job.backend]
        self.stage = Stage("start", "")
        self.checks = 0
        self.faulty: set[str] = set()
        self.on_gpu = job.device == "cuda"

    def examine(self) -> Done:
        """Run every check over every case; each check stops at its first fault."""
        for case, dtype in self._cases():
            if not _has_rows(case.arguments):
                continue
            first = self._first_call(case)
            self._check_reference(case, first, dtype)
            self._check_repeats(case, first)
            self._check_bounds(case, first)
            self._check_rows(case, first)
            if self.on_gpu:
                self._check_graph(case, first)
                self._check_load(case, first)
        return Done(self.checks)

    def time(self) -> Done:
        """Measure a call of the last case of each need, which has the layer's sizes."""
        us = {}
        for need in self.job.needs:
            dtype = need.traits.get("dtype", torch.float32)
            case = list(cases_of(self.op, need, dtype))[-1]
            self._begin("time", case)
            arguments = fresh(case.arguments, self.job.device)
            call = partial(self.backend.run, **arguments)
            seconds = seconds_per_call([call], self.job.device, REPEATS[self.job.device])
            us[case.name] = 1e6 * seconds
        return Done(self.checks, us)

    def _cases(self) -> Iterator[tuple[Case, torch.dtype]]:
        """Yield the cases of all needs that the backend serves, each once."""
        seen: set[str] = set()
        for need in self.job.needs:
            dtype = need.traits.get("dtype", torch.float32)
            for case in cases_of(self.op, need, dtype):
                key = f"{case.name} {kinds_of(need)} {dtype}"
                if key not in seen:
                    seen.add(key)
                    yield case, dtype

    def _begin(self, check: str, case: Case) -> None:
        self.stage = Stage(check, case.name)
        self.checks += 1
        self.send(self.stage)

    def _fault(self, kind: str, detail: str) -> None:
        """Report a fault, the first one of this kind only."""
        if kind not in self.faulty:
            self.faulty.add(kind)
            self.send(Fault(kind, self.stage, detail))

    def _run(self, arguments: Arguments) -> dict[str, Tensor]:
        """Call the backend -> its outputs. An error ends the examination."""
        try:
            return outputs(self.op, self.backend.run(**arguments), arguments)
        except Exception as error:  # whatever a kernel raises is a finding
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> BrokenProcessError:
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self._fault("illegal instruction" if "illegal instruction" in text else "error", text)
        return BrokenProcessError()

    def _wait(self) -> None:
        """Wait for the device, where an asynchronous error is raised."""
        if not self.on_gpu:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise self._broken(error) from error

    def _first_call(self, case: Case) -> dict[str, Tensor]:
        self._begin("call", case)
        arguments = self._fresh(case)
        first = _copied(self._run(arguments))
        self._wait()
        for name, value in case.arguments.items():
            pairs = zip(tensors_of(value), tensors_of(arguments[name]), strict=True)
            if name not in self.op.writes and not all(same_bits(*pair) for pair in pairs):
                self._fault("changes inputs", f"the argument {name} has other values afterwards")
        return first

    def _fresh(self, case: Case) -> Arguments:
        return fresh(case.arguments, self.job.device)

    def _check_reference(self, case: Case, first: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Compare with the reference on the CPU: bits on a CPU, else numbers."""
        if self.job.backend == "reference":
            return
        self._begin("reference", case)
        arguments = fresh(case.reference or case.arguments, "cpu")
        expected = outputs(self.op, self.op.reference(**arguments), arguments)
        for name, reference in expected.items():
            actual = first[name].cpu()
            if case.compared is not None and name.startswith("result"):
                actual = actual.index_select(-1, case.compared)
            wrong = self._difference(name, actual, reference, tolerance_of(case, dtype))
            if wrong:
                self._fault("wrong numbers", f"{name}: {wrong}")
                return

    def _difference(self, name: str, actual: Tensor, reference: Tensor, tolerance: float) -> str:
        """Return how an output differs from the reference's, "" if it agrees."""
        if actual.shape != reference.shape or actual.dtype != reference.dtype:
            expected = f"{list(reference.shape)} {reference.dtype}"
            return f"{list(actual.shape)} {actual.dtype}, not {expected}"
        exact = not self.on_gpu and self.job.backend != NUMBA
        if exact or not reference.numel():
            return "" if same_bits(actual, reference) else _count_other(actual, reference)
        if self.op.name in QUANTIZING and reference.dtype == torch.int32:
            actual, reference = (e4m3_values(x.view(torch.uint8)) for x in (actual, reference))
            tolerance = CODE_TOLERANCE
        if not reference.is_floating_point():
            quantized = reference.dtype in (torch.uint8, torch.int8)
            share = float((actual != reference).float().mean())
            allowed = MAX_OTHER_IDS if self.op.name in CHOSEN_IDS else 0.0
            # Where k is one ulp away a quantized cache may have another code.
            return "" if quantized or share <= allowed else _count_other(actual, reference)
        if reference.element_size() == 1:
            return ""
        tolerance = max(tolerance, TOLERANCE.get(reference.dtype, 0.0))
        scale = _magnitude(reference)
        a, b = actual.double(), reference.double()
        close = (a - b).abs() <= tolerance * scale + tolerance * b.abs()
        close |= (a == b) | (a.isnan() & b.isnan())
        return "" if bool(close.all()) else _count_other(actual, reference)

    def _check_repeats(self, case: Case, first: dict[str, Tensor]) -> None:
        """Compare the bits of calls in a row, launched without a wait between them."""
        self._begin("repeat", case)
        calls = [self._fresh(case) for _ in range(CALLS[self.job.device])]
        results = [_copied(self._run(arguments)) for arguments in calls]
        self._wait()
        for result in results:
            if wrong := _other_bits(first, result):
                self._fault("unstable", f"two calls with equal arguments differ in {wrong}")
                return

    def _check_bounds(self, case: Case, first: dict[str, Tensor]) -> None:
        """Call between canaries: no write outside of the tensors, no result left unwritten."""
        self._begin("bounds", case)
        for fill in FILLS:
            canaries = Canaries(fill)
            arguments = self._fresh(case)
            names = self.op.writes
            guarded = arguments | {name: _guarded(arguments[name], canaries) for name in names}
            with canaries:
                result = self._run(guarded)
            self._wait()
            if overwritten := canaries.overwritten():
                sizes = ", ".join(map(str, overwritten))
                self._fault("writes outside", f"next to tensors of {sizes} bytes")
                return
            if wrong := _other_bits(first, result):
                self._fault("unwritten", f"memory that no one wrote is part of {wrong}")
                return

    def _check_rows(self, case: Case, first: dict[str, Tensor]) -> None:
        """Compare the bits of some rows alone, of odd, reversed and repeated rows."""
        if self.op not in ROWS or not count_rows(self.op, case.arguments):
            return
        self._begin("rows", case)
        rows = list(range(count_rows(self.op, case.arguments)))
        repeated = rows if self.op.writes else rows * REPEATED[self.job.device]
        choices = [[row] for row in dict.fromkeys((rows[0], rows[-1], rows[len(rows) // 2]))]
        choices += [rows[1::2], rows[::-1], repeated]
        for chosen in choices:
            if not chosen:
                continue
            part, lines = take_rows(self.op, case.arguments, chosen)
            if not len(lines):
                continue
            result = self._run(fresh(part, self.job.device, self.op.writes))
            self._wait()
            for name, actual in result.items():
                if not name.startswith("result"):
                    continue
                reference = first[name].cpu().index_select(0, lines)
                if not same_bits(actual, reference):
                    self._fault(
                        "rows",
                        f"{name} of rows {_brief(chosen)} in a batch of {len(chosen)} has other "
                        f"bits than in a batch of {len(rows)}",
                    )
                    return

    def _check_graph(self, case: Case, first: dict[str, Tensor]) -> None:
        """Compare replays of a captured graph with the eager call, in bits."""
        from lockstep.errors import CaptureError
        from lockstep.worker.capture import CapturedFunction

        self._begin("graph", case)
        fixed = self._fresh(case)
        written = tensors_of(*(fixed[name] for name in self.op.writes))
        start = [x.clone() for x in written]
        pool = torch.cuda.graph_pool_handle()
        run = self.backend.run
        captured = CapturedFunction(lambda: run(**fixed), pool, lambda key: True, self.op.name)
        try:
            out = captured()
            for _ in range(3):
                for part in tensors_of(out):
                    if all(part.data_ptr() != other.data_ptr() for other in written):
                        part.fill_(-1)
                for part, value in zip(written, start, strict=True):
                    part.copy_(value)
                result = outputs(self.op, captured(), fixed)
                if wrong := _other_bits(first, result):
                    self._fault("graph", f"a replay differs from the eager call in {wrong}")
                    return
        except CaptureError as error:
            self._fault("graph", str(error))
        except RuntimeError as error:
            raise self._broken(error) from error

    def _check_load(self, case: Case, first: dict[str, Tensor]) -> None:
        """Compare the bits of calls that run during products and copies of a second stream.

        Half of the calls are on a stream of high priority: the op's other streams, which have a
        normal one, then run late.
        """
        self._begin("load", case)
        default = torch.cuda.current_stream()
        urgent = torch.cuda.Stream(priority=-1)
        with second_stream_load() as add_load:
            results = []
            for index in range(LOADED_CALLS):
                with torch.cuda.stream(urgent if index % 2 else default):
                    arguments = self._fresh(case)
                    add_load()
                    results.append(_copied(self._run(arguments)))
            self._wait()
        for result in results:
            if wrong := _other_bits(first, result):
                self._fault("race", f"under the load of a second stream, {wrong} has other bits")
                return


def tolerance_of(case: Case, dtype: torch.dtype) -> float:
    """Return the relative tolerance of a case for a model of this dtype.

    A state of 16 bits is rounded while a kernel runs: one ulp there changes outputs of fp32 by more
    than their own tolerance.
    """
    tensors = (x for value in case.arguments.values() for x in tensors_of(value))
    return max([TOLERANCE[dtype], *(TOLERANCE.get(x.dtype, 0.0) for x in tensors)])


@contextmanager
def second_stream_load() -> Iterator[Callable[[], None]]:
    """Give a function that adds work to a second stream: a matrix product and a copy."""
    stream = torch.cuda.Stream()
    a = torch.ones(LOAD_SIZE, LOAD_DEPTH, dtype=torch.float16, device="cuda")
    b = torch.ones(LOAD_DEPTH, LOAD_SIZE, dtype=torch.float16, device="cuda")
    product = torch.empty(LOAD_SIZE, LOAD_SIZE, dtype=torch.float16, device="cuda")
    copied = torch.empty_like(a)
    stream.wait_stream(torch.cuda.current_stream())

    def add_load() -> None:
        with torch.cuda.stream(stream):
            torch.mm(a, b, out=product)
            copied.copy_(a)

    yield add_load
    # Not after an error: the wait would raise it again, and the process ends anyway.
    stream.synchronize()


def _has_rows(arguments: Arguments) -> bool:
    first = next(iter(arguments.values()))
    return not isinstance(first, Tensor) or first.numel() > 0


def _copied(result: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in result.items()}


def _guarded(value: Any, canaries: Canaries) -> Any:
    """Return the same tensor, or dataclass of tensors, between canaries."""
    if isinstance(value, Tensor):
        return canaries.add_margins(value)
    parts = {
        name: canaries.add_margins(part)
        for name, part in vars(value).items()
        if isinstance(part, Tensor)
    }
    return replace(value, **parts) if parts else value


def _other_bits(expected: dict[str, Tensor], result: dict[str, Tensor]) -> str:
    """Return the first output with other bits and how many of them differ; "" if there is none."""
    for name, reference in expected.items():
        if not same_bits(result[name], reference):
            return f"{name} ({_count_other(result[name].cpu(), reference.cpu())})"
    return ""


def _count_other(actual: Tensor, reference: Tensor) -> str:
    """Return how many elements differ, and the first of them."""
    if actual.shape != reference.shape:
        return f"{list(actual.shape)}, not {list(reference.shape)}"
    other = (actual != reference) & ~((actual != actual) & (reference != reference))
    index = other.flatten().nonzero()[0].item()
    at = [int(i) for i in torch.unravel_index(torch.tensor(index), actual.shape)]
    value, expected = (x.flatten()[int(index)].item() for x in (actual, reference))
    values = f"{value:.9g}, not {expected:.9g}"
    return f"{int(other.sum())} of {actual.numel()} elements, first at {at}: {values}"


def _magnitude(x: Tensor) -> float:
    """Return the root mean square of the finite values, at least 1."""
    finite = x[x.isfinite()].double()
    return max(1.0, float(finite.square().mean().sqrt())) if finite.numel() else 1.0


def _brief(rows: list[int]) -> str:
    text = ", ".join(map(str, rows[:6]))
    return text + (", ..." if len(rows) > 6 else "")
