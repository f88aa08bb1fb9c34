"""Memory planner: rows, prompt tokens of a step, snapshots, graphs and pages that fit into a GPU.

The user's settings are fixed. For the others, the planner takes the first entry of a fixed ladder
that fits. So a plan follows from settings, bytes and costs alone, and more memory never gives an
entry further down. No answer depends on it.

The ladder shrinks rows, tokens and snapshots in this order:

1. rows, from 256 down to 16: requests beyond them wait, and small steps are less efficient;
2. prompt tokens of a step, from 2,048 to 512: long prompts take longer;
3. rows, from 16 down to 4;
4. prompt tokens, to 256;
5. rows, from 4 down to 1;
6. the snapshot of each row: a follow-up request computes its whole prompt again;
7. prompt tokens, to 64, the grid of recurrent layers.

Before each of these reductions it gives up CUDA graphs of prompt steps, see PROMPT_GRAPHS: a row or
a snapshot is worth more than a graph of a long prompt. So an entry has all rows, tokens and
snapshots that fit without these graphs, and as many of the graphs as fit next to them.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from lockstep.errors import CapacityError
from lockstep.step import PAGE_SIZE

ROWS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Numbers of rows in order of preference."""
TOKENS = (2048, 1024, 512, 256, 128, 64)
"""Prompt tokens of a step in order of preference; the last is the grid of recurrent layers."""
LADDER = ((16, 2048), (16, 512), (4, 512), (4, 256), (1, 256))
"""The smallest (rows, tokens) of stages 1 to 5."""


@dataclass(frozen=True)
class PromptGraphs:
    """CUDA graphs of prompt steps for which memory is planned.

    max_tokens: largest token count of a captured padded prompt step; 0: none is captured. joint:
    number of the largest joint steps whose results fit into the memory of graphs; 0: no joint step
    is captured.
    """

    max_tokens: int
    joint: int

    def within(self, limit: "PromptGraphs") -> "PromptGraphs":
        """Return as many of these graphs as a limit allows."""
        max_tokens = min(self.max_tokens, limit.max_tokens)
        return PromptGraphs(max_tokens, min(self.joint, limit.joint) if max_tokens else 0)


PROMPT_GRAPHS = (
    *(PromptGraphs(tokens, joint) for joint in (6, 2, 0) for tokens in (2048, 1024, 512)),
    PromptGraphs(256, 0),
    PromptGraphs(0, 0),
)
"""Graphs of prompt steps in order of preference.

The longest prompts lose their graphs first. They take the most memory and gain the least: an H200
needs longer for 2,048 tokens of Qwen3.6-27B than the host for their launches. Joint graphs follow,
since each may keep the logits of all rows. Graphs of short prompts are the last: 64 tokens take 17
ms with one and 59 ms without.
"""
ASSUMED_CONTEXT = 1024
"""Assumed mean context of a running request in tokens, as in chats: pages for it are reserved for
every row. Longer requests use pages of other rows, which wait.
"""
MAX_SNAPSHOTS_PER_ROW = 2
"""Snapshots of recurrent state per row with ample memory."""
SNAPSHOT_SHARE = 0.2
"""Share of spare memory for more snapshots; the rest goes to pages."""
PAGES_PER_ROW = 4
"""Upper bound of pages, as a multiple of those of all rows at max_model_len."""
NAMES = {
    "rows": "max_num_seqs",
    "tokens": "max_num_batched_tokens",
    "snapshots": "num_snapshots",
    "pages": "num_gpu_blocks",
    "cache_bytes": "kv_cache_memory_bytes",
    "prompt_buckets": "prompt_buckets",
}
"""Field of UserSizes -> name of the setting."""
GB = 1e9


class Costs(Protocol):
    """Bytes of an engine by the planner's choices."""

    @property
    def fixed(self) -> dict[str, int]:
        """Return the bytes that no choice changes, by name: weights, the CUDA context."""
        ...

    @property
    def page(self) -> int:
        """Return the bytes of a page over all layers."""
        ...

    @property
    def slot(self) -> int:
        """Return the bytes of a slot of recurrent state over all layers; 0 without recurrent
        layers.
        """
        ...

    def working(self, rows: int, tokens: int, graphs: PromptGraphs) -> dict[str, int]:
        """Return the bytes of the row table, the largest step and the graphs, by name."""
        ...


@dataclass(frozen=True)
class UserSizes:
    """Sizes that the user set; None where the planner chooses. snapshots: in total."""

    rows: int | None = None
    tokens: int | None = None
    snapshots: int | None = None
    pages: int | None = None
    cache_bytes: int | None = None
    prompt_buckets: tuple[int, ...] | None = None

    def settings(self) -> tuple[str, ...]:
        """Return the settings that the user gave, each as `name=value`."""
        return tuple(
            f"{NAMES[name]}={_written(value)}"
            for name, value in vars(self).items()
            if value is not None
        )


def _written(value: int | tuple[int, ...]) -> str:
    """Return the value of a setting as on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class LadderEntry:
    """Entry of the ladder. snapshots: minimum, over all rows."""

    rows: int
    tokens: int
    snapshots: int
    graphs: PromptGraphs

    @property
    def size(self) -> tuple[int, int, int]:
        """Return rows, tokens and snapshots, which the graphs of prompts yield to."""
        return self.rows, self.tokens, self.snapshots


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan: the chosen entry, bytes by part, and what more memory would allow.

    parts: bytes by name, pages and state included. available: bytes for all parts. notes: sentences
    for people. short: missing bytes, 0 where the plan fits. user_settings: the user's settings as
    name=value, for the error message.
    """

    entry: LadderEntry
    pages: int
    slots: int
    parts: dict[str, int]
    available: int
    notes: tuple[str, ...] = ()
    short: int = 0
    user_settings: tuple[str, ...] = ()

    @property
    def needed(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Planner:
    """Planner of an engine's memory on one GPU.

    columns: pages of the longest request. prefix_caching: prefixes are cached, for which recurrent
    layers need snapshots. max_graphs: graphs of prompts with ample memory.
    """

    user_sizes: UserSizes
    costs: Costs
    columns: int
    prefix_caching: bool = True
    max_graphs: PromptGraphs = PROMPT_GRAPHS[0]

    def ladder(self) -> list[LadderEntry]:
        """Return the entries in order, with the user's settings instead of their own."""
        pairs = list(_pairs())
        small = [(1, tokens) for tokens in TOKENS if tokens < LADDER[-1][1]]
        sizes = [self._size(*pair, True) for pair in pairs]
        sizes += [self._size(*pair, False) for pair in (pairs[-1], *small)]
        entries = [LadderEntry(*size, graphs) for size in sizes for graphs in self._graphs(size[1])]
        return list(dict.fromkeys(entries))

    def plan(self, available: int) -> MemoryPlan:
        """Return the plan of the first entry that fits into `available` bytes.

        Where none fits, return the minimum plan of the last entry, with `short` set.
        """
        entries = self.ladder()
        index = self._first_fit(entries, available)
        if index == len(entries):
            return self.min_plan(entries[-1], available)
        entry = entries[index]
        return self._filled(entry, available, tuple(self._notes(entries, index, available)))

    def min_plan(self, entry: LadderEntry, available: int = 0) -> MemoryPlan:
        """Return the minimum plan of an entry, whether it fits or not."""
        parts = self.min_bytes(entry)
        short = sum(parts.values()) - available
        if self.user_sizes.cache_bytes is not None:
            short = max(short, self._cache_of(parts) - self.user_sizes.cache_bytes)
        size = self.min_size(entry)
        settings = self.user_sizes.settings()
        return MemoryPlan(
            entry, *size, parts, available, short=max(short, 0), user_settings=settings
        )

    def min_bytes(self, entry: LadderEntry) -> dict[str, int]:
        """Return the minimum bytes of an entry, by part."""
        working = self.costs.working(entry.rows, entry.tokens, entry.graphs)
        parts = dict(self.costs.fixed) | working
        return parts | self._cache(*self.min_size(entry))

    def min_size(self, entry: LadderEntry) -> tuple[int, int]:
        """Return the minimum pages and slots of an entry, the null ones included."""
        return self._pages(entry.rows), self._slots(entry)

    def missing_bytes(self, entry: LadderEntry, budget: int) -> int:
        """Return the bytes that a cache of `budget` bytes lacks for an entry; negative for spare
        bytes.
        """
        return sum(self._cache(*self.min_size(entry)).values()) - budget

    def _size(self, rows: int, tokens: int, snapshots: bool) -> tuple[int, int, int]:
        """Return rows, tokens and snapshots of an entry. snapshots: each row has one."""
        user_sizes = self.user_sizes
        rows = rows if user_sizes.rows is None else user_sizes.rows
        kept = rows if snapshots and self._wants_snapshots else 0
        if user_sizes.snapshots is not None:
            kept = user_sizes.snapshots
        return rows, user_sizes.tokens or tokens, kept if self.costs.slot else 0

    def _graphs(self, tokens: int) -> list[PromptGraphs]:
        """Return the graphs of steps of this many prompt tokens, in order of preference.

        The token counts that the user set keep their graphs; joint graphs are given up.
        """
        limit = self.max_graphs
        if self.user_sizes.prompt_buckets is not None:
            return [
                PromptGraphs(limit.max_tokens, graphs.joint).within(limit)
                for graphs in PROMPT_GRAPHS
            ]
        limit = replace(limit, max_tokens=min(limit.max_tokens, tokens))
        return [graphs.within(limit) for graphs in PROMPT_GRAPHS]

    @property
    def _wants_snapshots(self) -> bool:
        return self.prefix_caching and self.costs.slot > 0

    def _first_fit(self, entries: list[LadderEntry], available: int) -> int:
        """Return the index of the first entry that fits, len(entries) where none does.

        The first entry is tried first: most GPUs have room for it. Then a bisection over rows,
        tokens and snapshots without graphs of prompts, since each entry costs dry runs of steps,
        and no such entry takes more than the one before it. The graphs of that entry are compared
        one after the other: those of long prompts may take less than some joint ones.
        """

        def fits(index: int) -> bool:
            return self._fits(entries[index], available)

        if fits(0):
            return 0
        ends = _ends(entries)
        group = bisect_left(ends, True, key=fits)
        if group == len(ends):
            return len(entries)
        begin = ends[group - 1] + 1 if group else 0
        return next(index for index in range(begin, len(entries)) if fits(index))

    def _fits(self, entry: LadderEntry, available: int) -> bool:
        """Return whether the minimum bytes of an entry fit.

        Most entries that do not are too large by their cache alone, which needs no dry run.
        """
        cached = sum(self._cache(*self.min_size(entry)).values())
        bound = self.user_sizes.cache_bytes
        if sum(self.costs.fixed.values()) + cached > available:
            return False
        if bound is not None and cached > bound:
            return False
        return sum(self.min_bytes(entry).values()) <= available

    def _cache(self, pages: int, slots: int) -> dict[str, int]:
        state = {"state": slots * self.costs.slot} if self.costs.slot else {}
        return {"pages": pages * self.costs.page} | state

    def _cache_of(self, parts: dict[str, int]) -> int:
        return parts["pages"] + parts.get("state", 0)

    def _pages(self, rows: int) -> int:
        """Return the minimum pages: the null page, and the larger of one full-length request and
        the assumed context of every row (where the planner chooses the rows).
        """
        if self.user_sizes.pages is not None:
            return self.user_sizes.pages
        mean = min(-(-ASSUMED_CONTEXT // PAGE_SIZE), self.columns)
        of_rows = mean * rows if self.user_sizes.rows is None else 0
        return 1 + max(self.columns, of_rows)

    def _slots(self, entry: LadderEntry) -> int:
        """Return the null slot, one per row, and the snapshots; 0 without recurrent layers."""
        return 1 + entry.rows + entry.snapshots if self.costs.slot else 0

    def _filled(self, entry: LadderEntry, available: int, notes: tuple[str, ...]) -> MemoryPlan:
        """Return the plan of an entry, with spare bytes given to snapshots and pages."""
        parts = self.min_bytes(entry)
        cached = self._cache_of(parts)
        spare = available - sum(parts.values())
        if self.user_sizes.cache_bytes is not None:
            spare = min(spare, self.user_sizes.cache_bytes - cached)
        size = self.fill_cache(entry, spare)
        parts |= self._cache(*size)
        return MemoryPlan(entry, *size, parts, available, notes)

    def fill_cache(self, entry: LadderEntry, spare: int) -> tuple[int, int]:
        """Return pages and slots of an entry with `spare` bytes beyond its minimum."""
        pages, slots = self.min_size(entry)
        if self._wants_snapshots and self.user_sizes.snapshots is None:
            max_more = MAX_SNAPSHOTS_PER_ROW * entry.rows - entry.snapshots
            more = max(min(max_more, int(spare * SNAPSHOT_SHARE) // self.costs.slot), 0)
            slots += more
            spare -= more * self.costs.slot
        if self.user_sizes.pages is None:
            useful = entry.rows * self.columns * PAGES_PER_ROW + 1
            pages = max(min(pages + spare // self.costs.page, useful), pages)
        return pages, slots

    def _notes(self, entries: list[LadderEntry], index: int, available: int) -> Iterator[str]:
        """Yield sentences about what was chosen, and what more memory would allow."""
        entry = entries[index]
        chosen = [
            f"{name}={value}"
            for name, value, user_size in (
                ("max_num_seqs", entry.rows, self.user_sizes.rows),
                ("max_num_batched_tokens", entry.tokens, self.user_sizes.tokens),
            )
            if user_size is None
        ]
        if chosen:
            yield f"{' and '.join(chosen)} chosen for {available / GB:.2f} GB of memory"
        if not index:
            return
        # With more memory a larger size fits without graphs of prompts first.
        ends = _ends(entries[: index + 1])[:-1]
        for target in dict.fromkeys((index - 1, *ends[-1:], *ends[:1])):
            better = entries[target]
            more = sum(self.min_bytes(better).values()) - available
            if more > 0:
                yield f"{more / GB:.2f} GB more would allow {_described(entry, better)}"


def _pairs() -> Iterator[tuple[int, int]]:
    """Yield (rows, tokens) of stages 1 to 5."""
    yield ROWS[0], TOKENS[0]
    corners = ((ROWS[0], TOKENS[0]), *LADDER)
    for (rows, tokens), (fewer, less) in pairwise(corners):
        for count in ROWS:
            if fewer <= count < rows:
                yield count, tokens
        for count in TOKENS:
            if less <= count < tokens:
                yield fewer, count


def _ends(entries: list[LadderEntry]) -> list[int]:
    """Return the indices of the entries with the fewest graphs of prompts, one for each size."""
    following = (*(entry.size for entry in entries[1:]), None)
    return [index for index, size in enumerate(following) if entries[index].size != size]


def _described(entry: LadderEntry, better: LadderEntry) -> str:
    """Describe what a better entry has more of."""
    gains = []
    if better.rows > entry.rows:
        gains.append(f"max_num_seqs={better.rows}")
    if better.tokens > entry.tokens:
        gains.append(f"max_num_batched_tokens={better.tokens}")
    if not gains and better.snapshots > entry.snapshots:
        gains.append("snapshots of recurrent state for prefix hits")
    if gains:
        return " and ".join(gains)
    if better.graphs.max_tokens > entry.graphs.max_tokens:
        gains.append(f"graphs of prompts up to {better.graphs.max_tokens} tokens")
    if better.graphs.joint > entry.graphs.joint:
        gains.append("more graphs of joint steps")
    return " and ".join(gains)


def describe_parts(parts: dict[str, int]) -> str:
    """Write bytes by part for people: "weights 19.24 GB, pages 1.90 GB"."""
    return ", ".join(f"{name} {size / GB:.2f} GB" for name, size in parts.items())


def shortage(plan: MemoryPlan) -> CapacityError:
    """Return the error of a plan that does not fit."""
    return CapacityError(shortage_reason(plan))


def shortage_reason(plan: MemoryPlan) -> str:
    """Return why a plan does not fit, in figures that add up, and what to change."""
    entry = plan.entry
    change = f", or change {', '.join(plan.user_settings)}" if plan.user_settings else ""
    return (
        f"the model does not fit even with max_num_seqs={entry.rows} and "
        f"max_num_batched_tokens={entry.tokens}: {plan.needed / GB:.2f} GB are needed "
        f"({describe_parts(plan.parts)}), {plan.available / GB:.2f} GB are available, "
        f"{plan.short / GB:.2f} GB are missing. Lower max_model_len, choose a kv_cache_dtype or "
        f"weights of fewer bytes, raise gpu_memory_utilization{change}."
    )
