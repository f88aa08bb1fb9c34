"""The scheduler's promises one by one: the grid, fairness, preemption, abort, refusals."""

import pytest

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.errors import CapacityError, ConfigError, RequestError
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.chunks import split_budget
from lockstep.scheduling.draft_length import FixedDraftLength
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import PromptChunk, Results, RowResult, Schedule
from lockstep.scheduling.scheduler import Scheduler


def make(
    pages: int = 100, rows: int = 4, slots: int = 0, every: int = 1, **options: object
) -> Scheduler:
    options = {"max_num_batched_tokens": 256, "max_model_len": 4096, "query_len": 1, **options}
    cache = Cache(CacheConfig(pages, 64, slots, rows, snapshot_every=every))
    return Scheduler(cache, max_num_seqs=rows, **options)  # type: ignore


def ask(sched: Scheduler, name: str, length: int, priority: int = 0, most: int = 8) -> Request:
    tokens = [sum(name.encode())] * length
    request = Request(name, tokens, SamplingParams(max_tokens=most), priority)
    sched.add(request)
    return request


def answer(plan: Schedule, count: int = 1) -> Results:
    found = {row: RowResult([5] * count, count - 1, count - 1) for row in plan.decode}
    return Results(found | {c.row: RowResult([5]) for c in plan.prompt if c.last})


def owner(sched: Scheduler, chunk: PromptChunk) -> str:
    """Whose chunk it is, while its row runs."""
    return next(e.request.id for e in sched.running if e.row == chunk.row)


def step(sched: Scheduler) -> Schedule:
    plan = sched.schedule()
    sched.update(plan, answer(plan))
    sched.cache.check()
    return plan


def drain(sched: Scheduler) -> None:
    for _ in range(2000):
        if not sched.has_work():
            break
        step(sched)
    assert not sched.has_work() and sched.cache.paged.pool.used == 0


def test_chunks_end_on_the_grid_and_leave_snapshots_there() -> None:
    sched = make(slots=9, max_num_batched_tokens=150)
    ask(sched, "a", 300)
    chunks = [step(sched).prompt[0] for _ in range(3)]
    assert [(c.start, c.length, c.last) for c in chunks] == [
        (0, 128, False), (128, 128, False), (256, 44, True)
    ]  # fmt: skip
    assert [c.snapshot_slot > 0 for c in chunks] == [True, True, False]
    drain(sched)
    ask(sched, "a", 300)
    plan = step(sched)
    assert plan.admissions[0].start == 256
    assert plan.prompt[0].state_src == chunks[1].snapshot_slot == plan.admissions[0].state_src


@pytest.mark.parametrize(
    ("length", "budget", "taken"),
    [
        (700, 64, [256, 512, 640]),
        (700, 128, [256, 512, 640]),
        (700, 192, [384, 576, 640]),
        (700, 256, [256, 512, 640]),
        (642, 128, [256, 512, 640]),
        (640, 128, [256, 512, 640]),
        (63, 64, []),
    ],
)
def test_snapshots_may_be_rare_but_for_a_prompts_last(
    length: int, budget: int, taken: list[int]
) -> None:
    """Every fourth page, at the first end of a chunk from there on, and the last whole page."""
    sched = make(slots=20, every=4, max_num_batched_tokens=budget)
    ask(sched, "a", length)
    found = []
    while sched.num_waiting or any(e.in_prompt for e in sched.running):
        found += [c for c in step(sched).prompt if c.snapshot_slot]
    assert [(c.start + c.length) // 64 * 64 for c in found] == taken
    drain(sched)
    ask(sched, "a", length + 200)
    assert step(sched).admissions[0].start == (taken[-1] if taken else 0)


def test_a_snapshot_is_left_where_cached_pages_end() -> None:
    """What two prompts begin with is computed by both, and found by the third: the second one's
    chunk ends there."""
    sched = make(slots=20, every=1 << 20, max_num_batched_tokens=512)
    common = [7] * 320
    found = []
    for number in range(3):
        tokens = [*common, *[100 + number] * 250]
        sched.add(Request(f"{number}", tokens, SamplingParams(max_tokens=4)))
        plan = step(sched)
        begins = plan.admissions[0].start
        chunks = list(plan.prompt)
        while any(e.in_prompt for e in sched.running):
            chunks += step(sched).prompt
        drain(sched)
        ends = [c.start + c.length for c in chunks]
        kept = [(c.start + c.length) // 64 * 64 for c in chunks if c.snapshot_slot]
        found.append((begins, ends, kept))
    assert found == [
        (0, [512, 570], [512]),
        (0, [320, 570], [320, 512]),
        (320, [570], [512]),
    ]


def test_no_chunk_ends_for_pages_without_a_state() -> None:
    sched = make(max_num_batched_tokens=512)
    for number in range(2):
        tokens = [*[7] * 320, *[100 + number] * 250]
        sched.add(Request(f"{number}", tokens, SamplingParams(max_tokens=4)))
        plan = step(sched)
        drain(sched)
    assert [(c.start, c.length) for c in plan.prompt] == [(320, 250)]


def turns(every: int, slots: int) -> float:
    """The share of prompt tokens that were cached, of eight conversations of six turns in turn."""
    sched = make(pages=4000, slots=slots, every=every, max_num_batched_tokens=64)
    for turn in range(6):
        for name in "abcdefgh":
            tokens = [ord(name)] * (500 + 300 * turn)
            sched.add(Request(f"{name}{turn}", tokens, SamplingParams(max_tokens=8)))
            drain(sched)
    return sched.cache.hit_tokens / sched.cache.query_tokens


def test_rare_snapshots_are_hit_where_many_push_each_other_out() -> None:
    """Room for 16 snapshots: those of every page are gone before a conversation comes back."""
    assert turns(every=1, slots=21) < 0.05
    assert turns(every=32, slots=21) > 0.6


def test_budget_below_the_grid_works_without_state_only() -> None:
    sched = make(max_num_batched_tokens=10)
    ask(sched, "a", 25)
    assert [step(sched).prompt[0].length for _ in range(3)] == [10, 10, 5]
    with pytest.raises(ConfigError, match="max_num_batched_tokens=10"):
        make(slots=9, max_num_batched_tokens=10)
    with pytest.raises(ConfigError, match="scheduling_policy='lifo'"):
        make(policy="lifo")


def test_without_state_chunks_end_anywhere_and_the_budget_is_used_up() -> None:
    sched = make(max_num_batched_tokens=150)
    ask(sched, "a", 310)
    chunks = [step(sched).prompt[0] for _ in range(3)]
    assert [(c.start, c.length, c.last) for c in chunks] == [
        (0, 150, False), (150, 150, False), (300, 10, True)
    ]  # fmt: skip
    assert not any(c.snapshot_slot for c in chunks)
    drain(sched)
    ask(sched, "b", 500)
    ask(sched, "c", 500)
    assert [c.length for c in step(sched).prompt] == [75, 75]


@pytest.mark.parametrize(
    ("remaining", "budget", "shares"),
    [
        ([500, 500], 256, [128, 128]),
        ([10, 500], 256, [10, 192]),
        ([500, 10, 100], 256, [128, 10, 100]),
        ([30], 256, [30]),
        ([], 256, []),
        ([65, 65, 65, 65], 256, [64, 64, 64, 64]),
    ],
)
def test_split_budget(remaining: list[int], budget: int, shares: list[int]) -> None:
    assert split_budget(remaining, budget, 64) == shares


def test_several_prompts_share_a_step_and_a_long_one_starves_nobody() -> None:
    sched = make(rows=4)
    ask(sched, "long", 3000)
    step(sched)
    short = ask(sched, "short", 60)
    plan = sched.schedule()
    assert {owner(sched, chunk) for chunk in plan.prompt} == {"long", "short"}
    sched.update(plan, answer(plan))
    assert short.output_token_ids == [5]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    sched = make(rows=4, max_num_batched_tokens=64)
    ask(sched, "long", 640, most=1)
    for tick in range(40):
        ask(sched, f"s{tick}", 50, most=1)
        step(sched)
    assert "long" not in sched.entries


def test_the_head_waits_for_pages_and_nobody_jumps_it() -> None:
    sched = make(pages=11)
    ask(sched, "a", 300, most=3)
    step(sched)
    step(sched)
    ask(sched, "big", 500)
    ask(sched, "tiny", 10)
    assert not step(sched).admissions
    order = []
    while sched.has_work():
        order += [a.spec.id for a in step(sched).admissions]
    assert order == ["big", "tiny"]


def test_priority_preempts_and_fcfs_does_not() -> None:
    for policy, expected in (("priority", ["low"]), ("fcfs", [])):
        sched = make(rows=1, policy=policy)
        ask(sched, "low", 10, priority=5)
        step(sched)
        ask(sched, "high", 10, priority=1)
        plan = step(sched)
        assert [s.request_id for s in plan.swap_out] == expected
        assert sched.num_swapped == len(expected)
        drain(sched)


def test_page_shortage_moves_the_last_row_and_computes_nothing_twice() -> None:
    sched = make(pages=5, rows=2)
    first = ask(sched, "a", 60, most=100)
    last = ask(sched, "b", 60, most=100)
    computed: dict[str, int] = {"a": 0, "b": 0}
    while sched.has_work():
        plan = sched.schedule()
        for chunk in plan.prompt:
            computed[owner(sched, chunk)] += chunk.length
        sched.update(plan, answer(plan))
    assert computed == {"a": 60, "b": 60}
    assert first.metrics.num_preemptions == 0 and last.metrics.num_preemptions > 0
    assert len(first.output_token_ids) == len(last.output_token_ids) == 100


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_that_are_made_in_pages_have_pages_of_the_row(ahead: bool) -> None:
    """Where all of a window is accepted, the next one's drafts are made behind it, before the host
    knows."""
    sched = make(query_len=8, drafts_in_pages=ahead)
    ask(sched, "a", 49, most=1000)
    assert len(step(sched).admissions[0].pages) == (2 if ahead else 1)
    for _ in range(40):
        before = sched.running[0].max_committed
        plan = sched.schedule()
        sched.update(plan, answer(plan, 8))
        reach = before + (16 if ahead else 8)
        assert len(sched.running[0].seq.pages) == -(-reach // 64)


def test_a_lone_request_ends_with_length_where_the_pool_ends() -> None:
    for query_len, ahead in ((1, False), (4, False), (4, True)):
        sched = make(pages=3, query_len=query_len, drafts_in_pages=ahead)
        request = ask(sched, "a", 60, most=1000)
        while sched.has_work():
            plan = sched.schedule()
            sched.update(plan, answer(plan, query_len))
        assert request.finish_reason == "length" and request.num_tokens == 128


def test_forced_preemption_continues_where_it_was() -> None:
    sched = make()
    request = ask(sched, "a", 70)
    step(sched)
    step(sched)
    sched.force_preempt("a")
    plan = step(sched)
    assert len(plan.swap_out) == len(plan.swap_in) == 1 and not plan.prompt
    assert len(plan.swap_out[0].pages) == 2 and request.metrics.num_preemptions == 1
    drain(sched)
    for over in ("a", "unknown"):
        sched.force_preempt(over)
    assert not sched.forced
    assert len(request.output_token_ids) == 8


def test_preempt_every_touches_every_row() -> None:
    sched = make(preempt_every=2)
    requests = [ask(sched, name, 10, most=40) for name in "abc"]
    drain(sched)
    assert all(r.metrics.num_preemptions > 0 for r in requests)
    assert all(len(r.output_token_ids) == 40 for r in requests)


@pytest.mark.parametrize("phase", ["waiting", "prompt", "decode", "swapped", "in flight"])
def test_abort_in_every_phase(phase: str) -> None:
    sched = make(rows=1, max_num_batched_tokens=64, policy="priority")
    request = ask(sched, "a", 100, priority=3)
    plans = [] if phase == "waiting" else [sched.schedule()]
    if phase in ("decode", "in flight", "swapped"):
        plans += [sched.schedule(), sched.schedule()]
    if phase == "swapped":
        ask(sched, "b", 10)
        plans.append(sched.schedule())
        assert sched.num_swapped == 1
    if phase != "in flight":
        for plan in plans:
            sched.update(plan, answer(plan))
    assert sched.abort("a") is request and request.finish_reason == "abort"
    sched.cache.check()
    again = ask(sched, "a", 10)
    if phase == "in flight":
        for plan in plans:
            assert sched.update(plan, answer(plan)) == []
    assert again.output_token_ids == []
    drain(sched)
    assert sched.abort("a") is None and len(again.output_token_ids) == 8


def test_prefixes_are_found_under_the_same_salt_only() -> None:
    sched = make()
    starts = []
    for name, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "\ud800"), ("e", "")):
        request = Request(name, [7] * 200, SamplingParams(max_tokens=2), cache_salt=salt)
        sched.add(request)
        drain(sched)
        starts.append(request.metrics.num_cached_tokens)
    assert starts == [0, 0, 192, 0, 192]


def test_what_can_never_fit_is_refused_and_named() -> None:
    sched = make(pages=3)
    with pytest.raises(CapacityError, match="prompt is too long: 128 tokens > 127 maximum"):
        ask(sched, "a", 128)
    with pytest.raises(RequestError, match="allowed: 1 to 4095"):
        ask(sched, "a", 4096)
    with pytest.raises(RequestError, match="prompt has 0 tokens"):
        ask(sched, "a", 0)
    ask(sched, "a", 127)
    with pytest.raises(RequestError, match="request_id='a'"):
        ask(sched, "a", 1)
    drain(sched)


def test_two_schedules_ahead_reserve_for_all_that_may_be_accepted() -> None:
    sched = make(query_len=40)
    ask(sched, "a", 64, most=500)
    plans = [sched.schedule() for _ in range(4)]
    assert plans[0].admissions[0].pages and len(sched.entries["a"].seq.pages) == 3
    assert sched.entries["a"].max_committed == 64 + 3 * 40
    for plan in plans:
        sched.update(plan, answer(plan))
    assert sched.entries["a"].max_committed == 64 + 3


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    sched = make()
    ask(sched, "a", 200)
    drain(sched)
    request = Request("b", [97] * 200, SamplingParams(prompt_logprobs=1))
    sched.add(request)
    assert step(sched).admissions[0].start == 0
    assert ask(sched, "a", 200) and step(sched).admissions[0].start == 192


@pytest.mark.parametrize(("most", "start"), [(10, 64), (4, 0)])
def test_a_follow_up_resumes_what_was_generated(most: int, start: int) -> None:
    sched = make()
    first = ask(sched, "a", 60, most=most)
    drain(sched)
    follow_up = [*first.prompt_token_ids, *first.output_token_ids, 1]
    sched.add(Request("b", follow_up, SamplingParams()))
    assert step(sched).admissions[0].start == start


def test_drafts_are_chosen_for_the_padded_step_and_observed() -> None:
    class Seen(FixedDraftLength):
        def __init__(self) -> None:
            super().__init__(2)
            self.asked: list[int] = []
            self.told: list[tuple[object, ...]] = []

        def choose(self, rows: int) -> int:
            self.asked.append(rows)
            return self.num_drafts if len(self.asked) > 1 else 1

        def observe(self, *what: object) -> None:
            self.told.append(what)

    policy = Seen()
    sched = make(query_len=3, row_buckets=(1, 2, 4), draft_policy=policy)
    for name in "abc":
        ask(sched, name, 5, most=20)
    step(sched)
    plans = [sched.schedule() for _ in range(2)]
    for plan, drafts, ready in zip(plans, (1, 2), (0, 1), strict=True):
        assert (plan.padded_rows, plan.num_drafts, plan.drafts_ready) == (4, drafts, ready)
        results = answer(plan, 1 + ready)
        results.decode_ms = 7.5
        sched.update(plan, results)
    assert policy.asked == [4, 4]
    assert policy.told == [(4, 1, 0, [0, 0, 0], 7.5), (4, 2, 1, [1, 1, 1], 7.5)]


def test_a_step_of_rows_that_want_no_drafts_brings_the_fewest() -> None:
    class Optional(FixedDraftLength):
        min_drafts = 0

    sched = make(query_len=3, draft_policy=Optional(2))
    for name in "ab":
        ask(sched, name, 5, most=20).speculate = False
    step(sched)
    assert sched.schedule().num_drafts == 0
    ask(sched, "c", 5, most=20)
    sched.schedule()
    assert sched.schedule().num_drafts == 2


def test_sources_of_tokens() -> None:
    assert RowResult([5]).sources == ["plain"]
    assert RowResult([5], num_drafted=2).sources == ["bonus"]
    assert RowResult([5, 6, 7], 2, 2).sources == ["draft", "draft", "bonus"]
    request = Request("a", [1], SamplingParams(max_tokens=2))
    sched = make(query_len=3)
    sched.add(request)
    plan = sched.schedule()
    sched.update(plan, answer(plan))
    plan = sched.schedule()
    sched.update(plan, answer(plan, count=3))
    assert request.token_sources == ["plain", "draft"], "a token past the end has no source"
