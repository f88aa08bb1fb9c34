"""Shared parts of benchmark scripts: options, request parameters, clocks, percentiles, output."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep.sampling_params import SamplingParams


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the whole numbers of an option, e.g. (1, 8, 64) of "1,8,64"."""
    return tuple(int(part) for part in text.split(","))


def print_json(line: dict[str, Any]) -> None:
    """Print one line of JSON at once, so that a run that is stopped keeps its figures."""
    print(json.dumps(line), flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at a share of the sorted values, without interpolation."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def greedy_params(output_len: int) -> SamplingParams:
    """Return greedy parameters of an answer of exactly `output_len` tokens, without its text."""
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)


def model_settings(folder: str | None, ranks: int = 1) -> dict[str, Any]:
    """Return settings for a folder's config.json with random weights, or the bundled model.

    ranks: tensor-parallel size.
    """
    load_format = "dummy" if folder else "auto"
    return {"model": folder, "load_format": load_format, "tensor_parallel_size": ranks}


def add_ranks_option(parser: argparse.ArgumentParser) -> None:
    """Add --tensor-parallel-size to a script's options, as `ranks`."""
    parser.add_argument(
        "--tensor-parallel-size", "-tp", dest="ranks", type=int, default=1, help="number of GPUs"
    )


def speculative_config(method: str, num_drafts: int, **settings: Any) -> dict[str, Any] | None:
    """Return the config of a drafter with num_drafts drafts in every step; None without drafts."""
    if not num_drafts:
        return None
    fixed = {"method": method, "num_speculative_tokens": num_drafts, "adaptive": False}
    return fixed | settings


class Stopwatch:
    """Seconds since construction: by the clock, and of CPU time of this process."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    @property
    def wall(self) -> float:
        """Return the seconds by the clock."""
        return time.perf_counter() - self._wall

    @property
    def cpu(self) -> float:
        """Return the CPU seconds of this process, all threads together."""
        return time.process_time() - self._cpu


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    lists = [(thread / "children").read_text() for thread in threads]
    return [int(child) for children in lists for child in children.split()]


def start_server(
    options: Sequence[str],
    *,
    program: Sequence[str] = ("-m", "lockstep"),
    stderr: IO[str] | int | None = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `lockstep serve` and wait until it listens, when it prints its first line.

    program: arguments of Python before the command. environment: its variables, None for those of
    this process. Raises RuntimeError if the server ends first.
    """
    command = [sys.executable, *program, "serve", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    assert server.stdout is not None
    if not server.stdout.readline():
        server.stdout.close()
        raise RuntimeError(f"the server ended with status {server.wait()} before it listened")
    return server
