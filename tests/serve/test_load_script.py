"""benchmarks/load.py: its checks, and the faults that they detect."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import KINDS, Memory, Resources, draw, judge, leaks_of, requests_until

SCRIPT = Path(__file__).parents[2] / "benchmarks/load.py"
GOOD: dict[str, Any] = {
    "faults": [],
    "left_behind": [],
    "server_mib_begin": 90.0,
    "server_mib": 100.0,
    "server_growth": 0.01,
    "engine_mib_begin": 190.0,
    "engine_mib": 200.0,
    "engine_growth": -0.02,
    "health_ms_p50": 1.0,
    "health_ms_p99": 20.0,
    "health_ms_max": 90.0,
    "overhead_ms_p50": 1.0,
    "overhead_ms_p99": 4.0,
    "compared": 100,
    "different": [],
}
BAD: dict[str, Any] = {
    "faults": ["load-1 (tools): status 500"],
    "left_behind": ["1 sockets"],
    "server_growth": 0.06,
    "engine_growth": 0.06,
    "health_ms_max": 101.0,
    "overhead_ms_p99": 5.1,
    "different": ["load-2 (tools)"],
}


def test_good_run_passes_all_checks() -> None:
    assert all(line.holds for line in judge(GOOD))


@pytest.mark.parametrize("name", BAD)
def test_each_fault_fails_one_check(name: str) -> None:
    lines = judge(GOOD | {name: BAD[name]})
    assert [line.holds for line in lines].count(False) == 1


def test_leaked_resources_are_named() -> None:
    before = Resources((0, 0, 0, 0.0), sockets=7, threads=9, tasks=3)
    assert leaks_of(before, before) == []
    assert leaks_of(before, replace(before, sockets=5)) == []
    after = Resources((1, 0, 0, 0.0), sockets=8, threads=9, tasks=5)
    assert leaks_of(before, after) == ["1 in the engine", "1 sockets", "2 tasks"]


def test_memory_growth_is_detected() -> None:
    """The first fifth is warm-up."""
    assert Memory(0, [50, *[100] * 99]).growth == 0
    assert Memory(0, [100 + number for number in range(100)]).growth > 0.5


def test_request_mix_is_complete_and_reproducible() -> None:
    drawn = [draw(number) for number in range(400)]
    assert len({one.kind for one in drawn}) == len(KINDS)
    assert [one.body for one in drawn] == [draw(number).body for number in range(400)]
    assert {one.status for one in drawn} == {200, 400, 413}


def test_load_runs_for_its_requests_and_seconds() -> None:
    assert len(list(requests_until(7, 0.0))) == 7
    began = time.monotonic()
    longer = list(requests_until(1, 0.2))
    assert time.monotonic() - began >= 0.2
    assert len(longer) > 1


@pytest.mark.slow
def test_a_short_load() -> None:
    """Times need an idle machine; the other checks pass on any."""
    command = [sys.executable, str(SCRIPT), "--requests", "60", "--streams", "20", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    result = json.loads(done.stdout)
    assert (result["faults"], result["left_behind"], result["different"]) == ([], [], [])
    assert result["requests"] == 60 and result["compared"] > 20
