"""Random walks of scheduler and cache on a simulated device that stores token contents."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.cache.host_tier import PAGES, SLOTS, Move
from lockstep.outputs import Logprob
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowResult, Schedule
from lockstep.scheduling.scheduler import Scheduler

PAGE = 4
EOS = 7
JUNK = -1
"""Content of memory that nothing valid was written to."""
ADAPTERS = {"tuned": "0a" * 16}


def fold(state: int, token: int) -> int:
    """Return the recurrent state after a token: a hash of all tokens so far."""
    return (state * 1_000_003 + token + 1) % (2**61 - 1)


class Truth:
    """A request's tokens and the state after each, generated from the state only."""

    def __init__(self, request: Request, max_tokens: int) -> None:
        self.tokens = list(request.prompt_token_ids)
        self.states = [0]
        for i in range(max_tokens):
            if i == len(self.tokens):
                self.tokens.append(self.states[i] % 40)
            self.states.append(fold(self.states[i], self.tokens[i]))


class Row:
    """Row of the device's row table. computed: tokens whose keys and state are stored."""

    def __init__(self, request: Request, pages: list[int], slot: int, computed: int) -> None:
        self.request = request
        self.pages = pages
        self.slot = slot
        self.computed = computed


class Device:
    """Simulated device that executes schedules in order.

    Every read must find the row's own tokens and state. kv: tokens of each page. state: recurrent
    state of each slot. saved: preempted rows by request id: (request, computed, pages, state).
    host: host page -> (part, content) of an entry. truth: expected tokens of each request.
    """

    def __init__(self, pages: int, slots: int, query_len: int, rng: random.Random) -> None:
        self.kv = [[JUNK] * PAGE for _ in range(pages)]
        self.state = [JUNK] * slots
        self.query_len = query_len
        self.rng = rng
        self.rows: dict[int, Row] = {}
        self.saved: dict[str, tuple[Request, int, list[list[int]], int]] = {}
        self.host: dict[int, tuple[int, object]] = {}
        self.requests: dict[str, Request] = {}
        self.truth: dict[Request, Truth] = {}

    def evict(self, moves: Sequence[Move], content: Callable[[int], object]) -> None:
        """Write a part of the content to every host page of the entry."""
        for move in moves:
            kept = content(move.unit)
            assert move.unit > 0
            for part, page in enumerate(move.host_pages):
                self.host[page] = (part, kept)

    def fetch(self, host_pages: tuple[int, ...]) -> object:
        """Return the content of an entry; all parts must belong together."""
        results = [self.host[page] for page in host_pages]
        assert results == [(part, results[0][1]) for part in range(len(host_pages))]
        return results[0][1]

    def launch(self, plan: Schedule) -> Results:
        """Execute a schedule, field by field in the order of a worker."""
        for request_id in plan.dropped:
            del self.saved[request_id]
        self.evict(plan.evicted.get(PAGES, ()), lambda page: self.kv[page][:])
        self.evict(plan.evicted.get(SLOTS, ()), lambda slot: self.state[slot])
        for s in plan.swap_out:
            row = self.rows.pop(s.row)
            assert row.request.id == s.request_id and row.pages[: len(s.pages)] == s.pages
            kept = [self.kv[p][:] for p in s.pages]
            state = self.state[s.state_slot]
            self.saved[s.request_id] = (row.request, row.computed, kept, state)
            for p in row.pages:
                assert p > 0
        for s in plan.swap_in:
            request, computed, kept, state = self.saved.pop(s.request_id)
            assert len(s.pages) >= len(kept)
            for page, content in zip(s.pages, kept, strict=False):
                self.kv[page] = content[:]
            self.state[s.state_slot] = state
            self.rows[s.row] = Row(request, list(s.pages), s.state_slot, computed)
        for a in plan.admissions:
            assert a.row > 0 and a.start < len(a.spec.prompt_token_ids) and a.start % PAGE == 0
            request = self.requests[a.spec.id]
            self.rows[a.row] = Row(request, list(a.pages), a.state_slot, a.start)
        for g in plan.grants:
            assert g.column == len(self.rows[g.row].pages), "a grant that does not follow"
            self.rows[g.row].pages += g.pages
        decoded = self._decode(plan)
        for move in plan.fetched.get(PAGES, ()):
            self.kv[move.unit] = list(self.fetch(move.host_pages))
        for move in plan.fetched.get(SLOTS, ()):
            self.state[move.unit] = self.fetch(move.host_pages)
        return Results({**decoded, **self._prompt(plan)})

    def _decode(self, plan: Schedule) -> dict[int, RowResult]:
        results = {}
        for number in plan.decode:
            row = self.rows[number]
            truth = self.truth[row.request]
            assert row.computed >= len(row.request.prompt_token_ids)
            self._read(row)
            assert not self.has_state or self.state[row.slot] == truth.states[row.computed]
            accepted = self.rng.randrange(self.query_len)
            begin = row.computed
            end = row.computed + 1 + accepted
            window = truth.tokens[begin:end] + [JUNK] * (self.query_len - 1 - accepted)
            self._write(row, begin, window)
            row.computed = end
            self.state[row.slot] = truth.states[end]
            emitted = truth.tokens[begin + 1 : end + 1]
            results[number] = RowResult(emitted, self.query_len - 1, accepted)
        return results

    def _prompt(self, plan: Schedule) -> dict[int, RowResult]:
        results = {}
        slots = []
        for c in plan.prompt:
            row = self.rows[c.row]
            truth = self.truth[row.request]
            assert row.computed == c.start and c.length > 0
            self._read(row)
            if self.has_state and c.start:
                assert self.state[c.state_src or row.slot] == truth.states[c.start]
                assert c.start % PAGE == 0
            assert not self.has_state or c.last or c.length % PAGE == 0
            slots += [s for s in (row.slot, c.snapshot_slot) if s]
        assert len(slots) == len(set(slots)), "one slot, two writers"
        assert not {c.state_src for c in plan.prompt} & set(slots), "a snapshot given to a writer"
        for c in plan.prompt:
            row = self.rows[c.row]
            end = c.start + c.length
            truth = self.truth[row.request]
            prompt = row.request.prompt_token_ids
            self._write(row, c.start, truth.tokens[c.start : end])
            row.computed = end
            self.state[row.slot] = truth.states[end]
            if c.snapshot_slot:
                self.state[c.snapshot_slot] = truth.states[end // PAGE * PAGE]
            assert c.last == (end == len(prompt))
            result = RowResult([truth.tokens[end]] if c.last else [])
            results[c.row] = result
            if row.request.params.prompt_logprobs is not None:
                result.prompt_logprobs = [
                    {t: Logprob(0.0, 1)} for t in prompt[c.start + 1 : end + 1]
                ]
        return results

    @property
    def has_state(self) -> bool:
        return len(self.state) > 1

    def _read(self, row: Row) -> None:
        length = min(row.computed, row.request.max_total_tokens)
        results = [t for p in row.pages for t in self.kv[p]][:length]
        assert results == self.truth[row.request].tokens[:length], "a row reads another's tokens"

    def _write(self, row: Row, begin: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, begin):
            if position // PAGE < len(row.pages):
                self.kv[row.pages[position // PAGE]][position % PAGE] = token


def expected(request: Request, truth: Truth) -> list[int]:
    """Return the whole answer of a request."""
    out = []
    for token in truth.tokens[len(request.prompt_token_ids) :]:
        out.append(token)
        stops = token == EOS and not request.params.ignore_eos
        if stops and len(out) > request.params.min_tokens:
            break
        if len(request.prompt_token_ids) + len(out) >= request.max_total_tokens:
            break
    return out


def check_prompt_logprobs(request: Request) -> None:
    """Assert that a request that asks for them gets entries of its full prompt, in order, with its
    first tokens."""
    if request.params.prompt_logprobs is not None:
        actual = [next(iter(entry or ())) for entry in request.prompt_logprobs]
        assert actual == request.prompt_token_ids[1:]


def random_request(rng: random.Random, name: str, stems: list[list[int]], maximum: int) -> Request:
    """Return a request of fewer than `maximum` prompt tokens, which start like one of the stems."""
    stem = rng.choice(stems)[: rng.randrange(1, min(33, maximum))]
    prompt = (stem + [rng.randrange(40)] * rng.randrange(3))[: maximum - 1]
    params = SamplingParams(
        max_tokens=rng.choice([None, 1, 5, 30]),
        min_tokens=rng.choice([0, 1]),
        ignore_eos=rng.random() < 0.5,
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )
    salt = rng.choice(["", "", "", "of another"])
    adapter = rng.choice(["", "", *ADAPTERS])
    ends = frozenset({EOS})
    return Request(
        name,
        prompt,
        params,
        rng.randrange(3),
        eos_token_ids=ends,
        cache_salt=salt,
        adapter=adapter,
    )


def check_plan(plan: Schedule, sched: Scheduler) -> None:
    """Assert that restored pages are used, and that moves make a plan non-empty, since empty plans
    are not launched."""
    busy = bool(plan.decode or plan.prompt)
    moved = [*plan.evicted.values(), *plan.fetched.values()]
    assert busy or not plan.swap_in, "a move in that computes nothing"
    assert busy or plan.swap_out or not any(moved), "moves that nobody makes"
    assert sum(c.length for c in plan.prompt) <= sched.budget


def assert_empty(sched: Scheduler, rows: int) -> None:
    """Assert that all resources of requests are free, and that the cache can be emptied."""
    cache = sched.cache
    assert cache.paged.pool.used == 0 and (cache.state is None or cache.state.pool.used == 0)
    assert not cache.seqs and not sched.running and not sched.queue and not sched.launched
    assert len(sched.free_rows) == rows
    assert not cache.host.pinned
    cache.drop_cached()
    cache.check()
    assert cache.host.used == 0 and cache.paged.pool.available == cache.paged.pool.total


def random_scheduler(
    rng: random.Random, state: bool, query_len: int, policy: str, drafts_in_pages: bool
) -> Scheduler:
    """Return a scheduler with few rows, pages and slots."""
    rows = rng.choice([1, 3, 5])
    pages = rng.choice([9, 17, 30])
    slots = 1 + rows + rng.choice([0, 1, 6]) if state else 0
    host = rng.choice([0, 4, 40, 80])
    return Scheduler(
        Cache(CacheConfig(pages, PAGE, slots, rows, host_pages=host, slot_host_pages=3)),
        max_num_seqs=rows,
        max_num_batched_tokens=rng.choice([4, 9, 24] if state else [3, 9, 24]),
        max_model_len=60,
        query_len=query_len,
        policy=policy,
        preempt_every=rng.choice([0, 0, 1, 7]),
        drafts_in_pages=drafts_in_pages,
        adapters=ADAPTERS,
    )


def walk(
    seed: int,
    ticks: int,
    state: bool,
    query_len: int,
    policy: str,
    steps_ahead: int,
    watch: Callable[[Scheduler], None] = lambda sched: None,
) -> Scheduler:
    """Run random requests and return the scheduler. watch: called with it before the first."""
    rng = random.Random(seed)
    sched = random_scheduler(rng, state, query_len, policy, bool(seed % 2))
    watch(sched)
    cache = sched.cache
    sizes = cache.config
    device = Device(sizes.num_pages, max(sizes.num_state_slots, 1), query_len, rng)
    stems = [[rng.randrange(40) for _ in range(32)] for _ in range(3)]
    flights: deque[tuple[Schedule, Results]] = deque()
    finished = set()
    result = {}
    aborted = set()
    tick = 0
    while tick < ticks or sched.has_work() or flights:
        tick += 1
        assert tick < ticks + 3_000, "the walk does not end"
        if tick < ticks and len(sched.entries) < 12 and rng.random() < 0.35:
            request = random_request(rng, f"r{len(result)}", stems, min(60, cache.capacity))
            result[request.id] = request
            device.requests[request.id] = request
            device.truth[request] = Truth(request, 60 + 8 * query_len)
            sched.add(request)
        if sched.entries and rng.random() < 0.03:
            victim = rng.choice(list(sched.entries))
            assert sched.abort(victim) is result[victim]
            aborted.add(victim)
            cache.check()
        if sched.entries and rng.random() < 0.03:
            sched.force_preempt(rng.choice(list(sched.entries)))
        plan = sched.schedule()
        cache.check()
        busy = bool(plan.decode or plan.prompt)
        check_plan(plan, sched)
        if not plan.is_empty:
            results = device.launch(plan)
            if plan.has_steps:
                flights.append((plan, results))
        while flights and (len(flights) > steps_ahead or not busy):
            for request in sched.update(*flights.popleft()):
                assert request.id not in finished | aborted
                if request.finish_reason:
                    finished.add(request.id)
                    assert request.output_token_ids == expected(request, device.truth[request])
                check_prompt_logprobs(request)
            cache.check()
    assert finished | aborted == set(result) and not finished & aborted
    for request in result.values():
        full = expected(request, device.truth[request])
        assert request.output_token_ids == full[: len(request.output_token_ids)]
    assert_empty(sched, sizes.max_num_seqs)
    assert not device.saved
    return sched


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_row_table_random_walk(state: bool, query_len: int, policy: str, steps_ahead: int) -> None:
    base = 100 * (steps_ahead + 3 * state + 6 * query_len) + len(policy)
    scheds = [walk(base + i, 210, state, query_len, policy, steps_ahead) for i in range(4)]
    assert sum(s.cache.hit_tokens for s in scheds) > 0
    assert sum(s.preemptions for s in scheds) > 0
    assert sum(s.cache.host_hit_tokens for s in scheds) > 0
