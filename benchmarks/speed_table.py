"""Print the cells of the speed table: recorded figures, or figures of this machine.

    python benchmarks/speed_table.py                          # recorded in benchmarks/results
    python benchmarks/speed_table.py --measure m [--only 27b-fp8]

Prints a Markdown table with a line for each model, weight format and K, and one for each kind of
prompt: the target in ms, and the recorded figure. Steps are in ms at ROWS rows and context CONTEXT.

--measure: folder of the folders that `benchmarks/models.py` writes; each cell is measured by
benchmarks/step.py on this machine, next to the recorded figure. --only: names of folders, separated
by commas. A line that fails has the last line of its error as its figure.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROWS = (1, 8, 64)
CONTEXT = 2048
PROMPTS = (1024, 2048, 8192, 32768)
"""Tokens of a prompt; those of more than a step are computed in several ones."""
BATCH = (8, 1024)
"""Prompts in one step, and tokens of each."""
TARGETS = {
    "Qwen3.6-27B bf16, K = 0": "12.9 / 13.9 / 19.3",
    "Qwen3.6-27B bf16, K = 3": "14.1 / 15.5 / 29",
    "Qwen3.6-27B bf16, 8,192 tokens": "620",
    "Qwen3.6-27B int4 (AWQ), K = 0": "6.4 / 7.3 / 15",
    "Qwen3.6-27B FP8, 128 x 128, K = 0": "7.8 / 8.9 / 16.5",
    "Qwen3.6-27B FP8, FP8 activations, K = 3": "- / - / 24",
    "Qwen3.6-27B FP8, FP8 activations, 8,192 tokens": "420",
    "Qwen3.6-35B-A3B bf16, K = 0": "2.1 / 5.6 / 17.0",
    "Qwen3.6-35B-A3B bf16, K = 3": "3.6 / 11.5 / 20.5",
    "Qwen3.6-35B-A3B bf16, 8,192 tokens": "125",
    "Qwen3.6-35B-A3B FP8, K = 0": "2.0 / - / -",
    "Qwen3.6-35B-A3B int4 (GPTQ), K = 0": "1.8 / - / -",
}
"""Line -> ms that were asked for on one H200, at ROWS rows."""
CELL_SECONDS = 300
"""Limit of one run of step.py."""


@dataclass(frozen=True)
class Line:
    """Line of the table.

    name: also that of its cell in benchmarks/results, where its figure is recorded. folder: of the
    model, within the folder of --measure. options: of step.py.
    """

    name: str
    folder: str
    options: tuple[str, ...]

    def measure(self, models: Path) -> str:
        """Return the measured figures, separated by slashes."""
        command = [sys.executable, str(FOLDER / "step.py"), str(models / self.folder)]
        try:
            run = subprocess.run(
                [*command, *self.options], capture_output=True, text=True, timeout=CELL_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"no result in {CELL_SECONDS} s"
        if run.returncode:
            return (run.stderr.strip().splitlines() or [f"status {run.returncode}"])[-1]
        results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        key = "prompt" if "--prompt" in self.options else "rows"
        return " / ".join(f"{result['ms']:.4g}" for result in results if key in result)


MODELS = (
    ("27b", "Qwen3.6-27B bf16", ()),
    ("27b-int4", "Qwen3.6-27B int4 (AWQ)", ()),
    ("27b-fp8", "Qwen3.6-27B FP8, 128 x 128", ()),
    ("27b-fp8", "Qwen3.6-27B FP8, FP8 activations", ("--activation-dtype", "fp8")),
    ("35b-a3b", "Qwen3.6-35B-A3B bf16", ()),
    ("35b-a3b-fp8", "Qwen3.6-35B-A3B FP8", ()),
    ("35b-a3b-int4", "Qwen3.6-35B-A3B int4 (GPTQ)", ()),
)
"""(folder, name of its cells in benchmarks/results, further options of step.py)."""


def lines() -> list[Line]:
    """Return the lines of the table in their order."""
    table = []
    rows = ",".join(map(str, ROWS))
    for folder, name, more in MODELS:
        for k in (0, 3):
            options = ("--rows", rows, "--k", str(k), "--context", str(CONTEXT), *more)
            table.append(Line(f"{name}, K = {k}", folder, options))
        for tokens in PROMPTS:
            options = ("--rows", "1", "--context", "64", "--prompt", str(tokens), *more)
            table.append(Line(f"{name}, {tokens:,} tokens", folder, options))
        count, tokens = BATCH
        options = ("--rows", str(count), "--context", "64", "--prompt", str(tokens))
        options += ("--prompt-rows", str(count), *more)
        table.append(Line(f"{name}, {count} prompts of {tokens:,} tokens", folder, options))
    return table


def recorded() -> dict[str, str]:
    """Return figure, unit, date and commit of each cell of steps and prompts, by its name."""
    cells = []
    for section in ("steps", "prompts"):
        cells += json.loads((FOLDER / "results" / f"{section}.json").read_text())["cells"]
    return {c["cell"]: f"{c['figure']} {c['unit']} ({c['date']}, {c['commit']})" for c in cells}


def print_table(models: Path | None, folders: set[str]) -> None:
    """Print the table, each line as soon as it is known.

    models: folder of the models to measure, None for the recorded figures alone. folders: of the
    models to print, empty for all.
    """
    figures = recorded()
    measures = models is not None
    print(f"| cell | target, ms | recorded |{' this machine, ms |' * measures}")
    print(f"|---|---|---|{'---|' * measures}")
    for line in lines():
        if folders and line.folder not in folders:
            continue
        figure = figures.get(line.name, "not measured")
        cells = [line.name, TARGETS.get(line.name, ""), figure]
        if models is not None:
            cells.append(line.measure(models))
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", type=Path, help="folder with a folder for each model")
    parser.add_argument("--only", default="", help="names of folders, separated by commas")
    args = parser.parse_args()
    print_table(args.measure, set(filter(None, args.only.split(","))))


if __name__ == "__main__":
    main()
