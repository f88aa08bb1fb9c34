"""Tables of which command finds each fault of tests/mutations, from docs/lab/faults.json.

    python docs/faults.py [RESULTS.json ...]

RESULTS.json: files that `python -m tests.mutations --json` wrote. Their results replace those of
the same fault and command in docs/lab/faults.json. Then the tables are written into the pages.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "lab" / "faults.json"
PAGES = ("conformance.md", "lab/mutations.md")
"""Pages with tables: conformance.md has the summary and the group FAILURES."""
FAILURES = "failures"
KNOWN = "faults"
"""Group whose faults have one command each. The lab notes list their runs."""
COMMANDS = {
    "quick": "`check --quick`",
    "default": "`check`",
    "doctor": "`doctor`",
    "test": "its test",
}
"""Commands in the order of their columns, with the head of each column."""
Results = dict[str, dict[str, Any]]
"""Result of each command, by fault."""


def groups() -> dict[str, tuple[Any, ...]]:
    """Return the faults of each group."""
    from tests.mutations.groups import GROUPS

    return GROUPS


def read_results() -> Results:
    """Return the stored results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["faults"]


def read_runs() -> list[str]:
    """Return when and where the stored results were measured."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    return [f"{r['date']}, {r['machine']}, torch {r['torch']}, seed {r['seed']}" for r in runs]


def merge(paths: Iterable[Path]) -> None:
    """Store the results of files. Results of commands that did not run are left out."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    for path in paths:
        run = json.loads(path.read_text(encoding="utf-8"))
        about = {name: run[name] for name in ("date", "machine", "torch", "seed")}
        if about not in stored["runs"]:
            stored["runs"].append(about)
        for entry in run["faults"]:
            results = stored["faults"].setdefault(entry["name"], {})
            for command, result in entry["commands"].items():
                if result["ran"]:
                    kept = {name: result[name] for name in ("case", "seconds")}
                    results[command] = {**kept, "run": stored["runs"].index(about)}
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def cell(result: dict[str, Any] | None) -> str:
    """Return the cell of a command's result."""
    if result is None:
        return "not run"
    return f"{result['seconds']:.0f} s" if result["case"] else "missed"


def fault_table(group: str, results: Results) -> Iterator[str]:
    """Yield the lines of a group's table: a row per fault, a column per command."""
    yield f"| breaks | fault | {' | '.join(COMMANDS.values())} | name of its test |"
    yield "|" + "---|" * (3 + len(COMMANDS))
    for fault in groups()[group]:
        cells = [cell(results.get(fault.name, {}).get(command)) for command in COMMANDS]
        name = f"{fault.name} (GPU)" if fault.gpu else fault.name
        test = f"`{fault.test.removeprefix('tests/')}`" if fault.test else ""
        # A sentence may contain a row of a table, and links that are relative to its own page.
        breaks = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", fault.breaks).replace("|", "").strip()
        yield f"| {' '.join(breaks.split())} | {name} | {' | '.join(cells)} | {test} |"


def summary_table(results: Results) -> Iterator[str]:
    """Yield the lines of the table of groups: faults that each command found, of those it tried."""
    yield f"| group | faults | {' | '.join(COMMANDS.values())} | any |"
    yield "|" + "---|" * (3 + len(COMMANDS))
    for group, faults in groups().items():
        if group == KNOWN:
            continue
        of_faults = [results[fault.name] for fault in faults if results.get(fault.name)]
        cells = []
        for command in COMMANDS:
            tried = [of_fault[command] for of_fault in of_faults if command in of_fault]
            cells.append(f"{sum(bool(result['case']) for result in tried)} of {len(tried)}")
        num_found = sum(any(result["case"] for result in one.values()) for one in of_faults)
        cells.append(f"{num_found} of {len(of_faults)}")
        yield f"| `{group}` | {len(faults)} | {' | '.join(cells)} |"


def tables(name: str) -> dict[str, list[str]]:
    """Return the lines of each table of a page, by the mark around it."""
    results = read_results()
    if name == "conformance.md":
        runs = ["", f"Runs: {'; '.join(read_runs()) or 'none yet'}."]
        failures = list(fault_table(FAILURES, results))
        return {"summary": [*summary_table(results), *runs], FAILURES: failures}
    other_groups = [group for group in groups() if group not in (KNOWN, FAILURES)]
    sections = [(f"### `{group}`", "", *fault_table(group, results), "") for group in other_groups]
    return {"groups": [line for section in sections for line in section]}


def page(name: str) -> str:
    """Return the text of a page with its tables as they must be."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for mark, lines in tables(name).items():
        begin = f"<!-- {mark}: made by docs/faults.py -->\n"
        start = text.index(begin) + len(begin)
        stop = text.index(f"<!-- /{mark} -->\n")
        text = text[:start] + "\n".join(lines) + "\n" + text[stop:]
    return text


def main() -> None:
    """Merge the files of the command line, and write the pages."""
    sys.path.insert(0, str(ROOT))
    merge(map(Path, sys.argv[1:]))
    for name in PAGES:
        (ROOT / "docs" / name).write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
