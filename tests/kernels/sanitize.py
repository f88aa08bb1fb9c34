"""Run compute-sanitizer over the kernels: memcheck and racecheck of every op's backends, as a
table.

    python -m tests.kernels.sanitize [--tool memcheck ...] [--op linear ...] [--dtype bfloat16
    ...]

Each (op, backend, dtype) runs in its own process, as many at once as there are cores. Exits with
status 1 if a tool reports anything that ALLOWED does not name, or if a process exceeds the time
limit. Needs a CUDA device and compute-sanitizer. docs/kernels/hazards.md explains the hazards.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lockstep.kernels
from lockstep.kernels.architecture import HOPPER
from tests.kernels.compile_launches import argument_kinds

TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis", "--num-cuda-barriers", "64"),
}
"""Options of each tool.

A call that CUDA refuses raises in the caller, so API errors are not reported. A Gluon kernel has
more mbarriers than the tool finds in its code.
"""
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
CASE = "case "
DONE = "done with all cases"
MAX_REPORTS = 50
"""Maximum printed reports of a job."""
SECONDS = 480
"""Time limit of all processes together, in seconds: with the start-up, less than nine minutes."""
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(\S.*)")
DETAIL = re.compile(r"^========= {3,}(\S.*)")
HOST = re.compile(r"Saved host backtrace|Host Frame")
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in ([\w.]+):(\d+)")
"""Pattern of an access of a race: kind, kernel, file and line."""


@dataclass(frozen=True)
class Allowed:
    """False positive of racecheck, explained in docs/kernels/hazards.md.

    kernels: the kernels that it is reported in.
    read, writes: prefixes of the source lines of the two accesses, where {} is the kernel's name.
    """

    kernels: tuple[str, ...]
    read: str
    writes: tuple[str, ...]
    reason: str


NAMED_BARRIER = (
    "all warps of a warpgroup meet at a named barrier (bar.sync of 128 threads) before one thread "
    "arrives at the mbarrier that the other warpgroup waits for, after the store and after the "
    "load; racecheck orders the accesses of the arriving thread alone"
)
ALLOWED = (
    Allowed(
        ("pipeline_kernel", "stream_k_kernel", "_latent_kernel", "_prefill_kernel")
        + ("_split_kv_kernel", "fp8_gemm_hopper_kernel"),
        "def {}(",
        (
            "def {}(",
            "gl.warp_specialize(",
            "if first_row < count * GROUP:",
            "if (count > 0) & (first_tile < tiles):",
        ),
        "warp_specialize hands partition numbers and arguments to its warps through shared memory, "
        "and bar.sync 1 of the whole CTA orders the write before the read; racecheck does not pair "
        "that barrier, which the two sides reach at different instructions",
    ),
    Allowed(
        ("_latent_kernel", "_split_kv_kernel"),
        "rescale = rescales.index(",
        ("rescales.index(",),
        NAMED_BARRIER,
    ),
    Allowed(
        ("_split_kv_kernel",), "row_max = row_maxes.index(", ("row_maxes.index(",), NAMED_BARRIER
    ),
)


@dataclass(frozen=True)
class Job:
    """Run of a tool over the cases of one backend of an op in one dtype."""

    tool: str
    op: str
    backend: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.backend} {self.dtype}"


def chosen_cases(op: Any, backend: Any) -> Iterator[dict[str, Any]]:
    """Yield the first case of each combination of kernels, of absent or quantized arguments, and of
    switches (constants that are None, true or false), as recorded from its launches."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    launched: list[tuple[str, tuple[tuple[str, Any], ...]]] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        switches = [(name, x) for name, x in values.items() if x is None or isinstance(x, bool)]
        launched.append((kernel.__name__, tuple(switches)))

    seen = set()
    for _, arguments in backend.cases(op):
        launched.clear()
        JITFunction.run = record
        try:
            backend.run(op, backend.fresh(arguments))
        finally:
            JITFunction.run = launch
        key = (frozenset(launched), frozenset(argument_kinds(arguments)))
        if launched and key not in seen:
            seen.add(key)
            yield arguments


def run_stream_k() -> None:
    """Launch the stream-K kernel, which needs more outputs than the cases have."""
    import torch

    from lockstep.kernels.compile_target import compile_target
    from lockstep.kernels.formats.weights.cases import random_weights
    from lockstep.kernels.linear.quantized import launch
    from lockstep.kernels.linear.quantized_tuning import candidates, fit_tile
    from tests.kernels.backends import Backend

    backend = Backend("quantized", "cuda", torch.bfloat16)
    weight = backend.place(dict(random_weights(1024, 1024))["int4 asymmetric"])
    for tokens in (8, 64):
        x = torch.randn(tokens, 1024, dtype=torch.bfloat16, device="cuda")
        tile = next(tile for tile in candidates(tokens, 1, weight.bits) if tile.pipeline)
        tile = replace(fit_tile(tile, weight, 1, HOPPER), stream_k=1)
        launch(x, weight, 1, tile, replace(compile_target(x.device), num_sms=3))
    torch.cuda.synchronize()


BEYOND_CASES = {("linear", "quantized", "bfloat16"): run_stream_k}
"""Further launches of a backend, for kernels that no case is large enough for."""


def run_push() -> None:
    """Launch every case of the exchange between GPUs, with peers that have already sent."""
    import torch

    from lockstep.kernels.exchange import push
    from tests.kernels.recorded_peers import recorded_cases

    for limit in (push.PACKET_LIMIT, 0):  # packets, then flags
        push.PACKET_LIMIT = push.NORM_ROWS = limit
        for count, (_, op, arguments) in enumerate(recorded_cases(torch.bfloat16, "cuda"), 1):
            op.backends["push"].run(**arguments)
            torch.cuda.synchronize()
            print(f"{CASE}{count}", flush=True)


EXCHANGES = {("exchange", "push", "bfloat16"): run_push}
"""Backends of several ranks, whose cases are no cases of a single one."""


def run_cases(op_name: str, backend_name: str, dtype: str) -> None:
    """Run the chosen cases of one backend once."""
    import torch

    from tests.kernels.backends import OPS, Backend

    if run := EXCHANGES.get((op_name, backend_name, dtype)):
        run()
        print(DONE, flush=True)
        return
    op = next(op for op in OPS if op.name == op_name)
    backend = Backend(backend_name, "cuda", getattr(torch, dtype))
    count = 0
    for arguments in chosen_cases(op, backend):
        backend.run(op, backend.fresh(arguments))
        torch.cuda.synchronize()
        count += 1
        print(f"{CASE}{count}", flush=True)
    if more := BEYOND_CASES.get((op_name, backend_name, dtype)):
        more()
    print(DONE, flush=True)


def jobs(tools: list[str], names: list[str], dtypes: list[str]) -> list[Job]:
    """Return the jobs of the ops of these names (all where there are none), longest first."""
    from tests.kernels.backends import OPS, of_every_op

    chosen = [op for op in OPS if not names or op.name in names]
    pairs = [param.values for param in of_every_op(chosen, reference=False)]
    kinds = [(op.name, b.name, str(b.dtype).removeprefix("torch.")) for op, b in pairs if b.on_gpu]
    kinds += [kind for kind in EXCHANGES if not names or kind[0] in names]
    # Racecheck of Hopper's kernels takes longest: it begins before all others.
    kinds.sort(key=lambda kind: not kind[1].startswith("hopper"))
    order = [tool for tool in reversed(TOOLS) if tool in tools]
    return [Job(tool, *kind) for tool in order for kind in kinds if kind[2] in dtypes]


def run_job(job: Job, deadline: float) -> tuple[str, float]:
    """Run a job until it ends or the deadline passes; return (output, seconds)."""
    tool = shutil.which("compute-sanitizer") or SANITIZER
    call = f"run_cases({job.op!r}, {job.backend!r}, {job.dtype!r})"
    program = [sys.executable, "-c", f"from tests.kernels.sanitize import run_cases; {call}"]
    command = [tool, "--tool", job.tool, *TOOLS[job.tool], "--target-processes", "application-only"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *program], env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - began))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the program under it
        output, _ = process.communicate()
    return output, time.monotonic() - began


def reports(output: str) -> list[str]:
    """Return the reports of a tool: one line and its accesses each, without host frames."""
    texts: list[str] = []
    for line in output.splitlines():
        if HOST.search(line):
            continue
        if match := REPORT.match(line):
            texts.append(match[1])
        elif (match := DETAIL.match(line)) and texts:
            texts[-1] += f"\n      {match[1]}"
    return texts


def allowed(report: str) -> Allowed | None:
    """Return the Allowed that matches all accesses of a report, or None."""
    accesses = ACCESS.findall(report)
    if len(accesses) != report.count(" access at "):
        return None  # an access whose place is not understood fits nothing

    def fits(rule: Allowed, kind: str, kernel: str, file: str, line: str) -> bool:
        texts = (rule.read,) if kind == "Read" else rule.writes
        begins = tuple(text.format(kernel) for text in texts)
        return kernel in rule.kernels and source_line(kernel, file, int(line)).startswith(begins)

    if {kind for kind, *_ in accesses} != {"Read", "Write"}:
        return None
    return next((rule for rule in ALLOWED if all(fits(rule, *a) for a in accesses)), None)


@cache
def source_line(kernel: str, file: str, line: int) -> str:
    """Return a line of the file of this name that defines the kernel, or "" if there is none."""
    for path in Path(lockstep.kernels.__path__[0]).rglob(file):
        text = path.read_text()
        if f"\ndef {kernel}(" in text:
            return text.splitlines()[line - 1].strip()
    return ""


def problems(output: str) -> list[str]:
    """Return what is wrong with a job's output: reports that are not allowed, and a missing end."""
    wrong = [report for report in reports(output) if allowed(report) is None]
    if DONE not in output.splitlines():
        wrong.append("did not finish:\n      " + "\n      ".join(output.splitlines()[-12:]))
    return wrong


def row(job: Job, output: str, seconds: float) -> str:
    """Return a job's line of the table."""
    wrong = len(problems(output))
    false = sum(allowed(report) is not None for report in reports(output))
    verdict = (f"{wrong} problems" if wrong else "clean") + (f", {false} allowed" if false else "")
    count = sum(line.startswith(CASE) for line in output.splitlines())
    return f"{job.tool:<10} {job!s:<40} {count:>3} cases {seconds:>4.0f} s  {verdict}"


def main() -> int:
    """Run the tools side by side and print a line per job and every report that is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", action="append", choices=list(TOOLS))
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="time limit of all jobs")
    options = parser.parse_args()
    chosen = jobs(options.tool or list(TOOLS), options.op, options.dtype or ["bfloat16", "float32"])
    deadline = time.monotonic() + options.seconds
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: run_job(job, deadline), chosen)
        for job, (output, seconds) in zip(chosen, results, strict=True):
            texts = problems(output)
            failed += bool(texts)
            print(row(job, output, seconds), *texts[:MAX_REPORTS], sep="\n  ", flush=True)
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
