"""Requests that begin again after a failure of the engine: their place, their tokens, suspects."""

import pytest

from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import SUSPECT_FAILURES, Request, continue_from
from lockstep.scheduling.schedule import Results, RowResult, Schedule
from lockstep.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import add_request, make

NEW = 5


def step(sched: Scheduler) -> Schedule:
    """Run a step whose rows emit their forced tokens, and NEW after them."""
    plan = sched.schedule()
    results = {}
    launched = sched.launched.get(plan.tick, {})
    for row, entry in launched.items():
        forced = entry.request.forced_token_ids[len(entry.request.output_token_ids) :]
        if row in plan.forced:
            results[row] = RowResult([*forced, NEW])
        else:
            results[row] = RowResult([*forced[:1]] or [NEW])
    sched.update(plan, Results(results))
    sched.cache.check()
    return plan


def drain(sched: Scheduler) -> None:
    """Step until all requests have ended."""
    for _ in range(1000):
        if not sched.has_work():
            break
        step(sched)
    assert not sched.has_work() and sched.cache.paged.pool.used == 0


def rows_of(sched: Scheduler) -> list[str]:
    """Return the ids of the running requests."""
    return sorted(entry.request.id for entry in sched.running)


def test_restarted_request_keeps_its_place_and_its_tokens() -> None:
    sched = make(rows=1)
    requests = [add_request(sched, name, 70, max_tokens=12) for name in "abc"]
    for _ in range(4):
        step(sched)
    first = requests[0]
    tokens = list(first.output_token_ids)
    assert len(tokens) == 4
    sched.restart("a")
    assert (first.output_token_ids, first.num_resumed) == ([], 4)
    assert first.params.forced_token_ids == tokens
    assert sched.cache.paged.pool.used == 0 and sched.num_waiting == 3
    plan = step(sched)
    assert [admission.spec.id for admission in plan.admissions] == ["a"]
    assert first.is_replaying
    step(sched)
    assert len(first.output_token_ids) == 5 and not first.is_replaying
    drain(sched)
    assert [len(request.output_token_ids) for request in requests] == [12, 12, 12]


def test_results_in_flight_are_ignored_after_a_restart() -> None:
    sched = make()
    request = add_request(sched, "a", 70)
    step(sched)
    late = sched.schedule()
    sched.restart("a")
    assert not sched.update(late, Results({row: RowResult([NEW]) for row in late.decode}))
    assert request.output_token_ids == []
    drain(sched)


def test_restart_during_the_replay_keeps_all_tokens() -> None:
    sched = make()
    request = add_request(sched, "a", 70)
    for _ in range(4):
        step(sched)
    sched.restart("a")
    step(sched)
    sched.restart("a")
    assert request.params.forced_token_ids == [NEW] * 4 and request.num_resumed == 4
    drain(sched)


def test_preempted_request_restarts() -> None:
    sched = make()
    request = add_request(sched, "a", 70, max_tokens=20)
    step(sched)
    step(sched)
    sched._preempt(Schedule(0), sched.entries["a"])
    assert sched.num_swapped == 1
    sched.restart("a")
    assert sched.num_swapped == 0 and sched.num_waiting == 1
    plan = step(sched)
    assert plan.dropped == ["a"] and [a.spec.id for a in plan.admissions] == ["a"]
    drain(sched)
    assert len(request.output_token_ids) == 20


def test_suspects_run_alone_until_they_have_a_new_token() -> None:
    sched = make()
    requests = [add_request(sched, name, 70, max_tokens=12) for name in "abc"]
    for _ in range(3):
        step(sched)
    for name in "ca":
        sched.entries[name].request.failures = SUSPECT_FAILURES
        sched.restart(name)
    assert [entry.request.id for entry in sched.suspects] == ["a", "c"], "in the queue's order"
    step(sched)
    assert rows_of(sched) == ["a"], "b gave its row back, and c waits"
    assert sched.entries["b"].request.num_resumed == 3
    step(sched)
    assert requests[0].failures == 0
    add_request(sched, "d", 10)
    step(sched)
    assert rows_of(sched) == ["c"]
    step(sched)
    assert requests[2].failures == 0
    step(sched)
    assert rows_of(sched) == ["a", "b", "c", "d"] and not sched.suspects
    drain(sched)
    assert [len(request.output_token_ids) for request in requests] == [12, 12, 12]


@pytest.mark.parametrize("has_row", [False, True])
def test_aborted_suspect_makes_way(has_row: bool) -> None:
    sched = make()
    for name in "ab":
        add_request(sched, name, 70)
        sched.entries[name].request.failures = SUSPECT_FAILURES
        sched.restart(name)
    if has_row:
        step(sched)
    sched.abort("a")
    assert [entry.request.id for entry in sched.suspects] == ["b"]
    step(sched)
    assert rows_of(sched) == ["b"]
    drain(sched)


def test_suspect_that_failed_alone_runs_first() -> None:
    sched = make()
    for name, failures in (("a", 2), ("b", 3), ("c", 2)):
        sched.add(Request(name, [1] * 70, SamplingParams(max_tokens=2), failures=failures))
    assert [entry.request.id for entry in sched.suspects] == ["b", "a", "c"]
    step(sched)
    assert rows_of(sched) == ["b"]
    drain(sched)


def test_new_suspect_waits_for_no_running_request() -> None:
    sched = make()
    running = add_request(sched, "a", 70, max_tokens=100)
    step(sched)
    suspect = Request("s", [1] * 70, SamplingParams(max_tokens=2), failures=SUSPECT_FAILURES)
    sched.add(suspect)
    step(sched)
    assert rows_of(sched) == ["s"]
    drain(sched)
    assert len(running.output_token_ids) == 100 and suspect.finish_reason == "length"


def test_continue_from_keeps_what_users_force() -> None:
    plain = SamplingParams(max_tokens=9, forced_mismatch="report")
    assert continue_from(plain, []) is plain
    continued = continue_from(plain, [1, 2])
    assert (continued.forced_token_ids, continued.forced_mismatch) == ([1, 2], "error")
    forced = plain.clone(forced_token_ids=[1, 2, 3])
    assert continue_from(forced, [1, 2]) is forced
    longer = continue_from(forced, [1, 2, 3, 4])
    assert (longer.forced_token_ids, longer.forced_mismatch) == ([1, 2, 3, 4], "report")
