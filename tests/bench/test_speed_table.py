"""benchmarks/speed_table.py has a line for every cell, with the figure that is recorded."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speed_table
from benchmarks.step import PROMPT_STEP, prompt_steps


def test_every_target_and_every_step_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    names = {line.name for line in speed_table.lines()}
    assert names >= set(speed_table.TARGETS)
    figures = speed_table.recorded()
    steps = [line.name for line in speed_table.lines() if ", K = " in line.name]
    assert not set(steps) - set(figures), "a step without a recorded figure"
    speed_table.print_table(None, set())
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names)
    assert figures["Qwen3.6-27B bf16, K = 0"] in printed


def test_measured_figures_are_those_of_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps count for steps, prompts for prompts; a failed run shows the end of its error."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "--activation-dtype" in command:
            return subprocess.CompletedProcess(command, 1, "", "one\nout of memory\n")
        results = [{"rows": 1, "ms": 2.5}, {"rows": 8, "ms": 10}, {"prompt": 9, "ms": 700.123}]
        return subprocess.CompletedProcess(command, 0, "\n".join(map(json.dumps, results)), "")

    monkeypatch.setattr(subprocess, "run", run)
    speed_table.print_table(Path("models"), {"27b-fp8"})
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 2 * (2 + len(speed_table.PROMPTS) + 1)
    by_activations = "FP8 activations"
    assert all(line.endswith("| out of memory |") for line in lines if by_activations in line)
    others = [line for line in lines if by_activations not in line]
    assert all(line.endswith("| 2.5 / 10 |") for line in others if ", K = " in line)
    assert all(line.endswith("| 700.1 |") for line in others if "tokens" in line)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("tokens", [1, 1024, PROMPT_STEP, PROMPT_STEP + 1, 4 * PROMPT_STEP])
def test_steps_of_prompts_compute_every_token_once(tokens: int, count: int) -> None:
    steps = prompt_steps(tokens, count)
    assert steps[0][0] == 0 and sum(step for _, step in steps) == tokens
    for (begin, step), (following, _) in zip(steps, steps[1:], strict=False):
        assert following == begin + step
    assert all(0 < step * count <= PROMPT_STEP for _, step in steps)
