"""Guarantees of the scheduler: the chunk grid, fairness, preemption, abort, refusals."""

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


def add_request(
    sched: Scheduler, name: str, length: int, priority: int = 0, max_tokens: int = 8
) -> Request:
    tokens = [sum(name.encode())] * length
    request = Request(name, tokens, SamplingParams(max_tokens=max_tokens), priority)
    sched.add(request)
    return request


def fake_results(plan: Schedule, count: int = 1) -> Results:
    result = {row: RowResult([5] * count, count - 1, count - 1) for row in plan.decode}
    return Results(result | {c.row: RowResult([5]) for c in plan.prompt if c.last})


def owner(sched: Scheduler, chunk: PromptChunk) -> str:
    """Return the request id of a chunk while its row runs."""
    return next(e.request.id for e in sched.running if e.row == chunk.row)


def step(sched: Scheduler) -> Schedule:
    plan = sched.schedule()
    sched.update(plan, fake_results(plan))
    sched.cache.check()
    return plan


def drain(sched: Scheduler) -> None:
    for _ in range(2000):
        if not sched.has_work():
            break
        step(sched)
    assert not sched.has_work() and sched.cache.paged.pool.used == 0


def test_chunks_end_on_the_grid_with_snapshots() -> None:
    sched = make(slots=9, max_num_batched_tokens=150)
    add_request(sched, "a", 300)
    chunks = [step(sched).prompt[0] for _ in range(3)]
    assert [(c.start, c.length, c.last) for c in chunks] == [
        (0, 128, False), (128, 128, False), (256, 44, True)
    ]  # fmt: skip
    assert [c.snapshot_slot > 0 for c in chunks] == [True, True, False]
    drain(sched)
    add_request(sched, "a", 300)
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
def test_rare_snapshots_include_the_last_page(length: int, budget: int, taken: list[int]) -> None:
    """Every fourth page, at the next chunk end, and at the last full page."""
    sched = make(slots=20, every=4, max_num_batched_tokens=budget)
    add_request(sched, "a", length)
    actual = []
    while sched.num_waiting or any(e.in_prompt for e in sched.running):
        actual += [c for c in step(sched).prompt if c.snapshot_slot]
    assert [(c.start + c.length) // 64 * 64 for c in actual] == taken
    drain(sched)
    add_request(sched, "a", length + 200)
    assert step(sched).admissions[0].start == (taken[-1] if taken else 0)


def test_snapshot_is_saved_where_cached_pages_end() -> None:
    """The second prompt's chunk ends at the end of the shared prefix, so the third one finds its
    state."""
    sched = make(slots=20, every=1 << 20, max_num_batched_tokens=512)
    common = [7] * 320
    actual = []
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
        actual.append((begins, ends, kept))
    assert actual == [
        (0, [512, 570], [512]),
        (0, [320, 570], [320, 512]),
        (320, [570], [512]),
    ]


def test_without_state_chunks_do_not_end_at_cached_pages() -> None:
    sched = make(max_num_batched_tokens=512)
    for number in range(2):
        tokens = [*[7] * 320, *[100 + number] * 250]
        sched.add(Request(f"{number}", tokens, SamplingParams(max_tokens=4)))
        plan = step(sched)
        drain(sched)
    assert [(c.start, c.length) for c in plan.prompt] == [(320, 250)]


def cached_share(every: int, slots: int) -> float:
    """Return the share of cached prompt tokens in eight interleaved conversations of six turns."""
    sched = make(pages=4000, slots=slots, every=every, max_num_batched_tokens=64)
    for turn in range(6):
        for name in "abcdefgh":
            tokens = [ord(name)] * (500 + 300 * turn)
            sched.add(Request(f"{name}{turn}", tokens, SamplingParams(max_tokens=8)))
            drain(sched)
    return sched.cache.hit_tokens / sched.cache.query_tokens


@pytest.mark.slow
def test_rare_snapshots_are_hit_where_frequent_ones_are_evicted() -> None:
    """With space for 16 snapshots those of every page are evicted before a conversation
    continues."""
    assert cached_share(every=1, slots=21) < 0.05
    assert cached_share(every=32, slots=21) > 0.6


def test_budget_below_the_grid_needs_a_model_without_state() -> None:
    sched = make(max_num_batched_tokens=10)
    add_request(sched, "a", 25)
    assert [step(sched).prompt[0].length for _ in range(3)] == [10, 10, 5]
    with pytest.raises(ConfigError, match="max_num_batched_tokens=10"):
        make(slots=9, max_num_batched_tokens=10)
    with pytest.raises(ConfigError, match="scheduling_policy='lifo'"):
        make(policy="lifo")


def test_without_state_chunks_use_the_full_budget() -> None:
    sched = make(max_num_batched_tokens=150)
    add_request(sched, "a", 310)
    chunks = [step(sched).prompt[0] for _ in range(3)]
    assert [(c.start, c.length, c.last) for c in chunks] == [
        (0, 150, False), (150, 150, False), (300, 10, True)
    ]  # fmt: skip
    assert not any(c.snapshot_slot for c in chunks)
    drain(sched)
    add_request(sched, "b", 500)
    add_request(sched, "c", 500)
    assert [c.length for c in step(sched).prompt] == [150]


@pytest.mark.parametrize(
    ("remaining", "minimum", "budget", "shares"),
    [
        ([500, 500], [0, 0], 256, [256, 0]),
        ([500, 300], [0, 0], 256, [128, 128]),
        ([10, 500], [0, 0], 256, [10, 192]),
        ([500, 10, 100], [0, 0, 0], 256, [128, 10, 100]),
        ([500, 200, 20], [0, 0, 0], 256, [128, 64, 20]),
        ([500, 500, 500], [0, 0, 64], 256, [192, 0, 64]),
        ([500, 10], [64, 10], 128, [64, 10]),
        ([30], [0], 256, [30]),
        ([], [], 256, []),
        ([65, 65, 65, 65], [0] * 4, 256, [65, 65, 65, 0]),
        ([500, 10], [0, 0], 64, [64, 0]),
    ],
)
def test_split_budget(
    remaining: list[int], minimum: list[int], budget: int, shares: list[int]
) -> None:
    assert split_budget(remaining, minimum, budget, 64) == shares


def test_long_prompt_does_not_starve_others() -> None:
    sched = make(rows=4)
    add_request(sched, "long", 3000)
    step(sched)
    short = add_request(sched, "short", 60)
    plan = sched.schedule()
    assert {owner(sched, chunk) for chunk in plan.prompt} == {"long", "short"}
    sched.update(plan, fake_results(plan))
    assert short.output_token_ids == [5]


def test_short_prompts_do_not_starve_a_long_one() -> None:
    sched = make(rows=4, max_num_batched_tokens=64)
    add_request(sched, "long", 640, max_tokens=1)
    for tick in range(40):
        add_request(sched, f"s{tick}", 50, max_tokens=1)
        step(sched)
    assert "long" not in sched.entries


def test_short_prompts_start_together_while_a_long_one_runs() -> None:
    """One new prompt per schedule would let the others wait for most of the long prompt."""
    sched = make(pages=400, rows=40, max_num_batched_tokens=1024)
    add_request(sched, "long", 4000)
    step(sched)
    short = [add_request(sched, f"short {i}", 20) for i in range(12)]
    plan = step(sched)
    assert sum(chunk.last for chunk in plan.prompt) == 12
    assert all(request.output_token_ids for request in short)
    assert plan.prompt[0].length == 1024 - 12 * 20
    drain(sched)


@pytest.mark.parametrize(("slots", "budget"), [(60, 64), (0, 128)])
def test_prompts_do_not_wait_for_those_of_lower_priority(slots: int, budget: int) -> None:
    """Rows have as many prompts of low priority as they may, and each needs many schedules."""
    sched = make(900, 30, slots, max_num_batched_tokens=budget, policy="priority")
    for i in range(20):
        add_request(sched, f"low {i}", 4000 - i, priority=1)
    for _ in range(20):
        step(sched)
    high = add_request(sched, "high", 60)
    step(sched)
    assert high.output_token_ids
    sched.cache.check()


def test_admitted_prompts_have_a_chunk_in_the_same_schedule() -> None:
    """The snapshot that a prompt resumes from is pinned in that schedule only."""
    sched = make(slots=8)
    lengths = (1000, 2000, 100, 300, 400, 200, 500)
    requests = []
    together = 0
    while len(requests) < len(lengths) or not all(r.output_token_ids for r in requests):
        if len(requests) < len(lengths):
            requests.append(add_request(sched, f"r{len(requests)}", lengths[len(requests)]))
        plan = step(sched)
        assert {one.row for one in plan.admissions} <= {chunk.row for chunk in plan.prompt}
        together = max(together, len(plan.prompt))
    assert together > 1


def test_first_waiting_request_is_not_overtaken() -> None:
    sched = make(pages=11)
    add_request(sched, "a", 300, max_tokens=3)
    step(sched)
    step(sched)
    add_request(sched, "big", 500)
    add_request(sched, "tiny", 10)
    assert not step(sched).admissions
    order = []
    while sched.has_work():
        order += [a.spec.id for a in step(sched).admissions]
    assert order == ["big", "tiny"]


def test_priority_preempts_and_fcfs_does_not() -> None:
    for policy, expected in (("priority", ["low"]), ("fcfs", [])):
        sched = make(rows=1, policy=policy)
        add_request(sched, "low", 10, priority=5)
        step(sched)
        add_request(sched, "high", 10, priority=1)
        plan = step(sched)
        assert [s.request_id for s in plan.swap_out] == expected
        assert sched.num_swapped == len(expected)
        drain(sched)


def test_no_later_request_overtakes_a_victim() -> None:
    """The pages of a preempted row would suffice for a request that arrived after it."""
    sched = make(pages=10, rows=3, policy="priority", max_num_batched_tokens=512)
    add_request(sched, "victim", 400, priority=3)
    add_request(sched, "later", 150, priority=3)
    step(sched)
    add_request(sched, "urgent", 150, priority=0)
    plan = step(sched)
    assert [swap.request_id for swap in plan.swap_out] == ["victim"]
    assert [admission.spec.id for admission in plan.admissions] == ["urgent"]
    drain(sched)


def test_page_shortage_swaps_out_the_last_row() -> None:
    sched = make(pages=5, rows=2)
    first = add_request(sched, "a", 60, max_tokens=100)
    last = add_request(sched, "b", 60, max_tokens=100)
    computed: dict[str, int] = {"a": 0, "b": 0}
    while sched.has_work():
        plan = sched.schedule()
        for chunk in plan.prompt:
            computed[owner(sched, chunk)] += chunk.length
        sched.update(plan, fake_results(plan))
    assert computed == {"a": 60, "b": 60}
    assert first.metrics.num_preemptions == 0 and last.metrics.num_preemptions > 0
    assert len(first.output_token_ids) == len(last.output_token_ids) == 100


@pytest.mark.parametrize("in_pages", [False, True])
def test_drafts_in_pages_have_pages_of_the_row(in_pages: bool) -> None:
    """If a window is fully accepted, the next drafts are written after it before the host knows."""
    sched = make(query_len=8, drafts_in_pages=in_pages)
    add_request(sched, "a", 49, max_tokens=1000)
    assert len(step(sched).admissions[0].pages) == (2 if in_pages else 1)
    for _ in range(40):
        before = sched.running[0].max_committed
        plan = sched.schedule()
        sched.update(plan, fake_results(plan, 8))
        reach = before + (16 if in_pages else 8)
        assert len(sched.running[0].seq.pages) == -(-reach // 64)


def test_single_request_ends_with_length_at_the_pool_size() -> None:
    for query_len, in_pages in ((1, False), (4, False), (4, True)):
        sched = make(pages=3, query_len=query_len, drafts_in_pages=in_pages)
        request = add_request(sched, "a", 60, max_tokens=1000)
        while sched.has_work():
            plan = sched.schedule()
            sched.update(plan, fake_results(plan, query_len))
        assert request.finish_reason == "length" and request.num_tokens == 128


def test_forced_preemption_resumes_without_recompute() -> None:
    sched = make()
    request = add_request(sched, "a", 70)
    step(sched)
    step(sched)
    sched.force_preempt("a")
    plan = step(sched)
    assert len(plan.swap_out) == len(plan.swap_in) == 1 and not plan.prompt
    assert len(plan.swap_out[0].pages) == 2 and request.metrics.num_preemptions == 1
    drain(sched)
    for over in ("a", "unknown"):
        sched.force_preempt(over)
    assert not sched.preempt_next
    assert len(request.output_token_ids) == 8


def test_rows_that_return_leave_new_prompts_their_chunks() -> None:
    """Tokens of returning rows were not known when the new prompts started."""
    sched = make(pages=900, rows=60, max_num_batched_tokens=1024, query_len=8)
    old = [add_request(sched, f"old {i}", 10, max_tokens=200) for i in range(40)]
    for _ in range(20):
        step(sched)
    for request in old:
        sched.force_preempt(request.id)
    for i in range(20):
        add_request(sched, f"new {i}", 60)
    plan = step(sched)
    assert len(plan.swap_in) == len(plan.decode) == 40
    lengths = [chunk.length for chunk in plan.prompt]
    assert lengths == [60] * len(plan.admissions) and sum(lengths) <= 1024
    drain(sched)


def test_preempt_every_preempts_every_row() -> None:
    sched = make(preempt_every=2)
    requests = [add_request(sched, name, 10, max_tokens=40) for name in "abc"]
    drain(sched)
    assert all(r.metrics.num_preemptions > 0 for r in requests)
    assert all(len(r.output_token_ids) == 40 for r in requests)


@pytest.mark.parametrize("phase", ["waiting", "prompt", "decode", "swapped", "in flight"])
def test_abort_in_every_phase(phase: str) -> None:
    sched = make(rows=1, max_num_batched_tokens=64, policy="priority")
    request = add_request(sched, "a", 100, priority=3)
    plans = [] if phase == "waiting" else [sched.schedule()]
    if phase in ("decode", "in flight", "swapped"):
        plans += [sched.schedule(), sched.schedule()]
    if phase == "swapped":
        add_request(sched, "b", 10)
        plans.append(sched.schedule())
        assert sched.num_swapped == 1
    if phase != "in flight":
        for plan in plans:
            sched.update(plan, fake_results(plan))
    assert sched.abort("a") is request and request.finish_reason == "abort"
    sched.cache.check()
    again = add_request(sched, "a", 10)
    if phase == "in flight":
        for plan in plans:
            assert sched.update(plan, fake_results(plan)) == []
    assert again.output_token_ids == []
    drain(sched)
    assert sched.abort("a") is None and len(again.output_token_ids) == 8


@pytest.mark.parametrize("adapter", ["", "tuned"])
def test_prefixes_are_shared_within_a_salt_only(adapter: str) -> None:
    sched = make(adapters={"tuned": "0a" * 16})
    starts = []
    for name, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "\ud800"), ("e", "")):
        params = SamplingParams(max_tokens=2)
        request = Request(name, [7] * 200, params, cache_salt=salt, adapter=adapter)
        sched.add(request)
        drain(sched)
        starts.append(request.metrics.num_cached_tokens)
    assert starts == [0, 0, 192, 0, 192]


def test_requests_that_never_fit_are_refused_by_name() -> None:
    sched = make(pages=3)
    with pytest.raises(CapacityError, match="prompt is too long: 128 tokens > 127 maximum"):
        add_request(sched, "a", 128)
    with pytest.raises(RequestError, match="allowed: 1 to 4095"):
        add_request(sched, "a", 4096)
    with pytest.raises(RequestError, match="prompt has 0 tokens"):
        add_request(sched, "a", 0)
    add_request(sched, "a", 127)
    with pytest.raises(RequestError, match="request_id='a'"):
        add_request(sched, "a", 1)
    drain(sched)


def test_schedules_ahead_reserve_pages_for_all_drafts() -> None:
    sched = make(query_len=40)
    add_request(sched, "a", 64, max_tokens=500)
    plans = [sched.schedule() for _ in range(4)]
    assert plans[0].admissions[0].pages and len(sched.entries["a"].seq.pages) == 3
    assert sched.entries["a"].max_committed == 64 + 3 * 40
    for plan in plans:
        sched.update(plan, fake_results(plan))
    assert sched.entries["a"].max_committed == 64 + 3


def test_prompt_logprobs_compute_the_full_prompt() -> None:
    sched = make()
    add_request(sched, "a", 200)
    drain(sched)
    request = Request("b", [97] * 200, SamplingParams(prompt_logprobs=1))
    sched.add(request)
    assert step(sched).admissions[0].start == 0
    assert add_request(sched, "a", 200) and step(sched).admissions[0].start == 192


@pytest.mark.parametrize(("maximum", "start"), [(10, 64), (4, 0)])
def test_follow_up_prompt_reuses_generated_pages(maximum: int, start: int) -> None:
    sched = make()
    first = add_request(sched, "a", 60, max_tokens=maximum)
    drain(sched)
    follow_up = [*first.prompt_token_ids, *first.output_token_ids, 1]
    sched.add(Request("b", follow_up, SamplingParams()))
    assert step(sched).admissions[0].start == start


def test_draft_policy_reads_padded_steps_and_results() -> None:
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
        add_request(sched, name, 5, max_tokens=20)
    step(sched)
    plans = [sched.schedule() for _ in range(2)]
    for plan, drafts, ready in zip(plans, (1, 2), (0, 1), strict=True):
        assert (plan.padded_rows, plan.num_drafts, plan.drafts_ready) == (4, drafts, ready)
        results = fake_results(plan, 1 + ready)
        results.decode_ms = 7.5
        sched.update(plan, results)
    assert policy.asked == [4, 4]
    assert policy.told == [(4, 1, 0, [0, 0, 0], 7.5), (4, 2, 1, [1, 1, 1], 7.5)]


def test_rows_without_drafts_use_the_minimum() -> None:
    class Optional(FixedDraftLength):
        min_drafts = 0

    sched = make(query_len=3, draft_policy=Optional(2))
    for name in "ab":
        add_request(sched, name, 5, max_tokens=20).speculate = False
    step(sched)
    assert sched.schedule().num_drafts == 0
    add_request(sched, "c", 5, max_tokens=20)
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
    sched.update(plan, fake_results(plan))
    plan = sched.schedule()
    sched.update(plan, fake_results(plan, count=3))
    assert request.token_sources == ["plain", "draft"], "a token past the end has no source"


def forced_results(plan: Schedule, remaining: dict[int, int]) -> Results:
    """Return results in which each forced row emits its window. remaining: tokens by row."""
    results = fake_results(plan)
    for row in plan.forced:
        count = min(remaining[row], 64)
        results.rows[row] = RowResult([5] * count, num_accepted=count - 1)
    return results


def test_forced_tokens_take_windows_within_the_budget() -> None:
    """Rows of 150, 20, 1 and 70 forced tokens: two windows of 64 fill the 128 tokens of a step."""
    sched = make(rows=4, query_len=4, forced_budget=128)
    for name, count in (("a", 150), ("b", 20), ("c", 1), ("d", 70)):
        params = SamplingParams(max_tokens=160, forced_token_ids=[5] * count)
        sched.add(Request(name, [1] * 10, params))
    plan = sched.schedule()
    assert len(plan.prompt) == 4 and not plan.forced
    sched.update(plan, fake_results(plan))
    remaining = {1: 150, 2: 20, 3: 1, 4: 70}
    lengths = []
    while any(entry.num_forced for entry in sched.running):
        plan = sched.schedule()
        assert set(plan.forced).isdisjoint(plan.decode)
        lengths.append((plan.forced, plan.forced_len, plan.decode))
        sched.update(plan, forced_results(plan, remaining))
        for row in plan.forced:
            remaining[row] -= min(remaining[row], 64)
    assert lengths == [([1, 2], 64, [3]), ([1, 4], 64, [2, 3]), ([1, 4], 64, [2, 3])]
    by_name = {entry.request.id: entry.request for entry in sched.running}
    assert by_name["a"].token_sources.count("forced") == 150
    assert by_name["c"].token_sources[:2] == ["forced", "plain"]
    drain(sched)


def test_forced_windows_have_pages_of_the_row() -> None:
    sched = make(forced_budget=64)
    sched.add(Request("a", [1] * 10, SamplingParams(max_tokens=160, forced_token_ids=[5] * 150)))
    step(sched)
    (entry,) = sched.running
    remaining = {entry.row: 150}
    for end in (74, 138, 160):
        plan = sched.schedule()
        assert entry.max_committed == end
        assert len(entry.seq.pages) * 64 >= end
        sched.update(plan, forced_results(plan, remaining))
        remaining[entry.row] -= min(remaining[entry.row], 64)
    drain(sched)


def test_forced_tokens_up_to_the_end_need_no_decode_step() -> None:
    sched = make(forced_budget=64)
    request = Request("a", [1] * 10, SamplingParams(max_tokens=20, forced_token_ids=[5] * 20))
    sched.add(request)
    step(sched)
    plan = sched.schedule()
    assert (plan.forced, plan.forced_len) == ([1], 64)
    sched.update(plan, forced_results(plan, {1: 20}))
    assert request.finish_reason == "length" and request.output_token_ids == [5] * 20
    assert not sched.schedule().computes
