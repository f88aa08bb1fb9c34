"""The memory planner: what fits, what shrinks first, and consistent figures."""

from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.step import PAGE_SIZE
from lockstep.worker.build import GPU_PROMPT_BUCKETS
from lockstep.worker.memory_planner import (
    ASSUMED_CONTEXT,
    PROMPT_GRAPHS,
    ROWS,
    TOKENS,
    LadderEntry,
    MemoryPlan,
    Planner,
    PromptGraphs,
    UserSizes,
    shortage_reason,
)

COLUMNS = 500
GB = 10**9
BYTES = st.integers(0, 200 * GB)
SLOTS = st.sampled_from([0, 1_000_000, 177_000_000])


@dataclass(frozen=True)
class FixedCosts:
    """Memory costs by a formula."""

    page: int = 1_000_000
    slot: int = 177_000_000
    graph_token: int = 100_000
    fixed: dict[str, int] = field(default_factory=lambda: {"weights": 19 * GB, "overhead": GB})

    def working(self, rows: int, tokens: int, graphs: PromptGraphs) -> dict[str, int]:
        joint = graphs.joint * (rows * 4_000_000 + graphs.max_tokens * 10_000)
        graph_bytes = rows * 7_000_000 + graphs.max_tokens * self.graph_token + joint
        return {"table": rows * 1_500_000, "step": tokens * 400_000, "graphs": graph_bytes}


def planner(slot: int = 177_000_000, **user_sizes: Any) -> Planner:
    """Return a planner with these explicit settings."""
    return Planner(UserSizes(**user_sizes), FixedCosts(slot=slot), COLUMNS)


def rank(plan: MemoryPlan, planner: Planner) -> int:
    """Return the index of a plan's entry in the ladder, or the ladder's length if the plan does not
    fit."""
    ladder = planner.ladder()
    return len(ladder) if plan.short else ladder.index(plan.entry)


@given(BYTES, SLOTS)
def test_plan_fits_and_parts_add_up(available: int, slot: int) -> None:
    plans = planner(slot)
    plan = plans.plan(available)
    if plan.short:
        assert plan.needed == available + plan.short
        return
    assert plan.needed <= available
    assert plan.parts["pages"] == plan.pages * plans.costs.page
    assert plan.parts.get("state", 0) == plan.slots * slot
    working = plans.costs.working(plan.entry.rows, plan.entry.tokens, plan.entry.graphs)
    assert plan.parts | working == plan.parts
    assert plan.pages > COLUMNS, "one request of max_model_len fits"
    assert plan.pages > plan.entry.rows * ASSUMED_CONTEXT // PAGE_SIZE
    if slot:
        assert plan.slots >= 1 + plan.entry.rows


@given(BYTES, BYTES, SLOTS)
def test_plan_is_monotonic_in_memory(one: int, other: int, slot: int) -> None:
    plans = planner(slot)
    small, large = (plans.plan(size) for size in sorted((one, other)))
    assert rank(large, plans) <= rank(small, plans)


@given(BYTES, SLOTS, st.sampled_from([100_000, 800_000]))
def test_bisection_finds_first_fitting_entry(available: int, slot: int, graph_token: int) -> None:
    """Graphs of long prompts may take more memory than joint ones."""
    plans = replace(planner(slot), costs=FixedCosts(slot=slot, graph_token=graph_token))
    fits = [sum(plans.min_bytes(entry).values()) <= available for entry in plans.ladder()]
    assert rank(plans.plan(available), plans) == (fits.index(True) if any(fits) else len(fits))


def sizes_of(plans: Planner) -> list[list[LadderEntry]]:
    """Return the entries of a ladder by rows, tokens and snapshots."""
    return [list(entries) for _, entries in groupby(plans.ladder(), attrgetter("size"))]


@given(SLOTS)
def test_sizes_of_the_ladder_are_sorted_by_memory(slot: int) -> None:
    """The bisection needs it of the entries without graphs of prompts."""
    plans = planner(slot)
    sizes = [sum(plans.min_bytes(entries[-1]).values()) for entries in sizes_of(plans)]
    assert sizes == sorted(sizes, reverse=True)


def test_ladder_order_is_documented() -> None:
    sizes = [entries[0] for entries in sizes_of(planner())]
    pairs = [(entry.rows, entry.tokens) for entry in sizes]
    assert pairs[0] == (ROWS[0], TOKENS[0])
    assert pairs[pairs.index((16, 2048)) + 1 :] == [
        *((16, 1024), (16, 512)),
        *((rows, 512) for rows in (12, 8, 6, 4)),
        (4, 256),
        *((rows, 256) for rows in (3, 2, 1)),
        *((1, tokens) for tokens in (256, 128, 64)),
    ]
    assert [entry.snapshots for entry in sizes[-4:]] == [1, 0, 0, 0]
    assert all(entry.snapshots == entry.rows for entry in sizes[:-3])


def test_graphs_of_prompts_yield_to_rows() -> None:
    graphs = {
        entries[0].size[:2]: [(entry.graphs.max_tokens, entry.graphs.joint) for entry in entries]
        for entries in sizes_of(planner())
    }
    joint = [(tokens, joint) for joint in (6, 2, 0) for tokens in (2048, 1024, 512)]
    assert graphs[32, 2048] == [*joint, (256, 0), (0, 0)]
    assert graphs[16, 512] == [(512, 6), (512, 2), (512, 0), (256, 0), (0, 0)]
    assert graphs[1, 64] == [(64, 6), (64, 2), (64, 0), (0, 0)]


def test_every_choice_of_graphs_ends_at_a_token_count() -> None:
    counts = [graphs.max_tokens for graphs in PROMPT_GRAPHS if graphs.max_tokens]
    assert counts[0] == GPU_PROMPT_BUCKETS[-1] and set(counts) <= set(GPU_PROMPT_BUCKETS)


def test_tight_memory_costs_graphs_before_a_row() -> None:
    plans = planner()
    entries = next(entries for entries in sizes_of(plans) if entries[0].rows == 24)
    needed = [sum(plans.min_bytes(entry).values()) for entry in entries]
    for entry, available in zip(entries, needed, strict=True):
        plan = plans.plan(available)
        assert (plan.entry.size, plan.entry.graphs) == (entry.size, entry.graphs)
    below = plans.plan(min(needed) - 1)
    assert below.entry.rows < 24 and below.entry.graphs == PROMPT_GRAPHS[0]


def test_graphs_of_set_token_counts_stay() -> None:
    limit = PromptGraphs(1024, 6)
    plans = replace(planner(prompt_buckets=(64, 1024)), max_graphs=limit)
    assert {entry.graphs for entry in plans.ladder()} == {
        *(PromptGraphs(1024, joint) for joint in (6, 2, 0))
    }
    none = replace(planner(prompt_buckets=()), max_graphs=PromptGraphs(0, 0))
    assert {entry.graphs for entry in none.ladder()} == {PromptGraphs(0, 0)}
    assert "or change prompt_buckets=64,1024." in shortage_reason(plans.plan(20 * GB))


def test_engines_without_graphs_have_none_to_give_up() -> None:
    plans = replace(planner(), max_graphs=PromptGraphs(0, 0))
    assert all(len(entries) == 1 for entries in sizes_of(plans))


@given(
    BYTES,
    st.none() | st.integers(1, 1024),
    st.none() | st.integers(64, 4096),
    st.none() | st.integers(0, 40),
)
@example(25 * GB, 16, None, None)
def test_explicit_settings_are_kept(
    available: int, rows: int | None, tokens: int | None, snapshots: int | None
) -> None:
    plans = Planner(UserSizes(rows, tokens, snapshots), FixedCosts(), COLUMNS)
    entry = plans.plan(available).entry
    assert rows in (None, entry.rows) and tokens in (None, entry.tokens)
    assert snapshots in (None, entry.snapshots)


def test_explicit_pages_and_cache_bytes_bound_cache() -> None:
    assert planner(pages=700).plan(200 * GB).pages == 700
    bound = 2 * GB
    plan = planner(cache_bytes=bound).plan(200 * GB)
    assert plan.parts["pages"] + plan.parts["state"] <= bound
    short = planner(cache_bytes=GB // 2).plan(200 * GB)
    assert "or change kv_cache_memory_bytes=500000000." in shortage_reason(short)
    assert short.short and f"{short.short / GB:.2f} GB are missing" in shortage_reason(short)


def test_snapshots_are_at_most_two_per_row() -> None:
    plans = planner(rows=4)
    entry = plans.ladder()[0]
    assert plans.fill_cache(entry, 0)[1] == 9
    assert plans.fill_cache(entry, 5 * 177_000_000)[1] == 10
    assert plans.fill_cache(entry, 100 * GB)[1] == 13
    assert replace(plans, prefix_caching=False).fill_cache(entry, 100 * GB)[1] == 9


def test_notes_name_choice_and_gain_of_more_memory() -> None:
    plans = planner()
    plan = plans.plan(24 * GB)
    first, *rest = plan.notes
    assert f"max_num_seqs={plan.entry.rows} and max_num_batched_tokens=" in first
    better = plans.ladder()[rank(plan, plans) - 1]
    missing = sum(plans.min_bytes(better).values()) - 24 * GB
    assert rest[0].startswith(f"{missing / GB:.2f} GB more would allow")
    assert "max_num_seqs=256 and max_num_batched_tokens=2048" in rest[-1]
    assert planner(rows=2, tokens=256).plan(24 * GB).notes == ()
    assert len(plans.plan(200 * GB).notes) == 1


def test_notes_name_graphs_that_were_given_up() -> None:
    plans = planner()
    entries = next(entries for entries in sizes_of(plans) if entries[0].rows == 24)
    graphs = [entry.graphs for entry in entries]

    def notes(entry: LadderEntry) -> tuple[str, ...]:
        return plans.plan(sum(plans.min_bytes(entry).values())).notes

    one = notes(entries[graphs.index(PromptGraphs(1024, 0))])
    assert "GB more would allow graphs of prompts up to 2048 tokens" in one[1]
    assert one[2].endswith("GB more would allow max_num_seqs=32")
    assert one[3].endswith("GB more would allow max_num_seqs=256")
    assert len(one) == 4
    one = notes(entries[graphs.index(PromptGraphs(2048, 2))])
    assert one[1].endswith("GB more would allow more graphs of joint steps")
    # Rows and tokens are the user's: the graphs alone were chosen.
    fixed = replace(plans, user_sizes=UserSizes(rows=24, tokens=2048))
    fewest = fixed.plan(sum(fixed.min_bytes(fixed.ladder()[-1]).values()))
    assert fewest.entry.graphs == PromptGraphs(0, 0)
    assert fewest.notes[0].endswith("GB more would allow graphs of prompts up to 256 tokens")


def test_shortage_reason_names_missing_bytes() -> None:
    plan = planner().plan(20 * GB)
    message = shortage_reason(plan)
    assert f"{plan.needed / GB:.2f} GB are needed (weights 19.00 GB" in message
    assert "20.00 GB are available" in message
    assert f"{(plan.needed - 20 * GB) / GB:.2f} GB are missing. Lower max_model_len" in message


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_explicit_rows_need_one_full_request(rows: int) -> None:
    """It is not refused for lack of pages for every row's assumed context."""
    plans = planner(slot=0, rows=rows, tokens=64)
    minimum = sum(plans.min_bytes(plans.ladder()[-1]).values())
    assert plans.plan(minimum).pages == COLUMNS + 1
    assert plans.plan(minimum - 1).short == 1
