"""compute-sanitizer over the kernels: every op's cases once, memcheck and racecheck, as a table.

    python -m tests.kernels.sanitize [--tool memcheck ...] [--op linear ...] [--dtype bfloat16 ...]

Status 1 if a tool finds an error or an op was not run. Needs a CUDA device and compute-sanitizer.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
"""With the options of each: a call that CUDA refuses is the caller's business, and raises there."""
HOME = Path("/usr/local/cuda/bin/compute-sanitizer")
BEGIN = "cases of "
END = "done with "
FOUND = re.compile(r"========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(\S.*)")
MOST_CASES = 4


def run(names: list[str], dtypes: list[str]) -> None:
    """Every op's first cases once by each backend, between lines that name both."""
    import torch

    from tests.kernels.backends import OPS, of_every_op

    chosen = [op for op in OPS if not names or op.name in names]
    for op, backend in (param.values for param in of_every_op(chosen)):
        if not backend.on_gpu or str(backend.dtype).removeprefix("torch.") not in dtypes:
            continue
        what = f"{op.name} {backend}"
        print(f"{BEGIN}{what}", flush=True)
        for _, arguments in backend.cases(op, MOST_CASES):
            backend.run(op, backend.fresh(arguments))
        torch.cuda.synchronize()
        print(f"{END}{what}", flush=True)


def sanitized(tool: str, rest: list[str]) -> dict[str, list[str]]:
    """Op and backend -> what the tool found while it ran; "no end" where it did not get through."""
    found = shutil.which("compute-sanitizer") or str(HOME)
    own = [sys.executable, "-m", "tests.kernels.sanitize", "--run", *rest]
    command = [found, "--tool", tool, *TOOLS[tool], "--target-processes", "application-only", *own]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    errors: dict[str, list[str]] = {}
    current = "start"
    for line in (done.stdout + done.stderr).splitlines():
        if line.startswith(BEGIN):
            current = line.removeprefix(BEGIN)
            errors[current] = ["no end"]
        elif line.startswith(END):
            errors[current].remove("no end")
            current = "between ops"
        elif match := FOUND.match(line):
            errors.setdefault(current, []).append(match[1])
    if not errors or done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        errors.setdefault("the tool", []).append(f"status {done.returncode}: {tail}")
    return errors


def main() -> int:
    """Parses the options, runs each tool, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run the cases, unwatched")
    parser.add_argument("--tool", action="append", choices=list(TOOLS))
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--dtype", action="append")
    options = parser.parse_args()
    dtypes = options.dtype or ["bfloat16", "float32"]
    if options.run:
        run(options.op, dtypes)
        return 0
    rest = [part for op in options.op for part in ("--op", op)]
    rest += [part for dtype in dtypes for part in ("--dtype", dtype)]
    results = {tool: sanitized(tool, rest) for tool in options.tool or TOOLS}
    print("".join(f"{head:<34}" for head in ("op", *results)))
    for name in dict.fromkeys(name for found in results.values() for name in found):
        cells = []
        for found in results.values():
            errors = found.get(name, ["not run"])
            cells.append(f"{len(errors)} lines of errors" if errors else "clean")
        print("".join(f"{cell:<34}" for cell in (name, *cells)))
    wrong = [(t, n, e) for t, found in results.items() for n, e in found.items() if e]
    for tool, name, errors in wrong:
        print(f"\n{tool}, {name}:", *errors[:12], sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
