"""Write the counts on the pages from benchmarks/log/2026-11.md and from the code.

python docs/counts.py         # writes them into the pages; tests/test_docs.py finds stale ones
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "log" / "2026-11.md"


def answers(cell: str, machine: str) -> Callable[[], str]:
    """Return a function that reads the number of answers of a check's latest run from the log.

    cell: first cell of the row; the table has the latest run first. machine: the beginning of a
    later cell of the row.
    """

    def read() -> str:
        pattern = rf"^\| {re.escape(cell)} \| \**([\d,]+) of \1\b.*\| {machine}"
        row = re.search(pattern, RESULTS.read_text(), re.MULTILINE)
        if row is None:
            raise LookupError(f"benchmarks/log/2026-11.md has no run of {cell} on {machine}")
        return row[1]

    return read


def faults() -> str:
    """Return the number of faults that tests.mutations puts into a copy."""
    from tests.mutations.groups import ALL

    return str(len(ALL))


@dataclass(frozen=True)
class Count:
    """Number within a page. before, after: regular expressions of the text around it."""

    page: str
    before: str
    after: str
    read: Callable[[], str]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of the number, with the text around it."""
        return re.compile(rf"({self.before})([\d,]+)({self.after})")


QUICK = answers("`lockstep check --quick`", "CPU")
QUICK_ON_GPU = answers("`lockstep check --quick`", "H200")
DEFAULT = answers("`lockstep check --shard 1/2` and `2/2`, scenarios with twins", "CPU")
FULL = answers("`lockstep check --full --shard 1/8` to `8/8`, 3 graph modes", "H200")
COUNTS = (
    Count("README.md", "lockstep check --quick, ", " cases", QUICK),
    Count("README.md", r"`lockstep check`, in two shards \| all ", " cases", DEFAULT),
    Count("README.md", "On a CPU `lockstep check --quick` compares ", " answers", QUICK),
    Count("README.md", r"`lockstep check --quick` \| ", " of", QUICK_ON_GPU),
    Count("README.md", r"`lockstep check --full`, 3 graph modes \| ", " of", FULL),
    Count("docs/images/terminal.svg", "lockstep check --quick: ", " cases", QUICK),
    Count("docs/images/terminal.svg", ">", " cases, all equal", QUICK),
    Count("docs/conformance.md", "There are ", " faults", faults),
    Count("docs/conformance.md", "All of its ", " cases were", DEFAULT),
)


def stale() -> Iterator[tuple[str, str, str]]:
    """Yield (page and place, what it says, what is right) of each wrong or missing count."""
    for count in COUNTS:
        match = count.pattern.search((ROOT / count.page).read_text())
        actual = match[2] if match else "nothing"
        if actual != count.read():
            yield f"{count.page}: {count.before}", actual, count.read()


def main() -> None:
    """Write every count into its page."""
    sys.path.insert(0, str(ROOT))
    for count in COUNTS:
        page = ROOT / count.page
        value = count.read()
        text = count.pattern.sub(lambda m, new=value: f"{m[1]}{new}{m[3]}", page.read_text())
        page.write_text(text)


if __name__ == "__main__":
    main()
