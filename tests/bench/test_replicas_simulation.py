"""The simulation of replicas: its laws, not its figures."""

import json

import pytest

from benchmarks import speed_table
from benchmarks.replicas import (
    FORCED_SECONDS,
    POLICIES,
    PROMPT_TOKENS_PER_SECOND,
    STEP_SECONDS,
    Chat,
    Replica,
    Turn,
    Workload,
    prefix_affinity,
    round_robin,
    simulate,
    step_seconds,
)

SHORT = Workload(seconds=60.0, think_seconds=5.0)


def test_one_replica_leaves_no_choice() -> None:
    outcomes = [simulate(1, policy, SHORT) for policy in POLICIES.values()]
    assert all(one == outcomes[0] for one in outcomes)
    assert outcomes[0].num_requests > 20 and 0.5 < outcomes[0].hit_rate < 1


def test_affinity_keeps_the_hit_rate_of_one_replica() -> None:
    one = simulate(1, prefix_affinity, SHORT).hit_rate
    affinity, spread = (simulate(6, policy, SHORT) for policy in (prefix_affinity, round_robin))
    assert affinity.hit_rate > one - 0.1
    assert spread.hit_rate < affinity.hit_rate - 0.1
    assert spread.percentile(0.95) > affinity.percentile(0.95)
    assert spread.num_requests == affinity.num_requests, "both serve all requests"


def test_streams_of_a_lost_replica_go_on() -> None:
    plain = simulate(3, prefix_affinity, SHORT)
    lost = simulate(3, prefix_affinity, SHORT, lose_at=30.0)
    assert lost.pauses and not plain.pauses
    assert lost.num_requests == plain.num_requests
    assert sum(lost.pauses) < sum(lost.redecoded)


def test_the_cache_keeps_the_latest_snapshots() -> None:
    replica = Replica(Workload(snapshots=3))
    for number in range(3):
        chat = Chat(number, 0, 1, 3000, [2500, 3000])
        replica.add(Turn(chat, 0, 0.0, 2500, 10))
    assert list(replica.snapshots) == [("chat", 1, 0), ("system", 0, 0), ("chat", 2, 0)]
    again = Turn(Chat(2, 0, 1, 3000, [2500, 3000]), 1, 0.0, 3000, 10)
    assert replica.hit(again) == 2500 // 64 * 64
    assert replica.hit(Turn(Chat(0, 0, 1, 3000, [2500, 3000]), 1, 0.0, 3000, 10)) == 2048
    assert replica.hit(Turn(Chat(0, 1, 1, 3000, [2500, 3000]), 1, 0.0, 3000, 10)) == 0


def test_rates_are_the_recorded_figures() -> None:
    """docs/scaling.md has the simulation's results: run benchmarks/replicas.py after a change."""
    figures = speed_table.recorded()
    steps = " / ".join(f"{1e3 * seconds:.2f}" for _, seconds in STEP_SECONDS)
    assert figures["Qwen3.6-27B bf16, K = 0"].startswith(f"{steps} ms at 1 / 8 / 64 rows ")
    prompt = 8192e3 / PROMPT_TOKENS_PER_SECOND
    assert figures["Qwen3.6-27B bf16, 8,192 tokens"].startswith(f"{prompt:.0f} ms ")
    cells = json.loads((speed_table.FOLDER / "results" / "forced.json").read_text())["cells"]
    forced = {cell["cell"]: cell["figure"] for cell in cells}
    milliseconds = forced["Qwen3.6-27B bf16: forced token of every row"].split(" / ")
    assert milliseconds[0] == f"{1e3 * FORCED_SECONDS:.3f}"


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.01327), (8, 0.01437), (128, 0.04092)])
def test_steps_take_the_measured_time(rows: int, seconds: float) -> None:
    assert step_seconds(rows) == pytest.approx(seconds)


def test_a_turn_takes_its_prompt_and_its_steps() -> None:
    replica = Replica(SHORT)
    turn = Turn(Chat(0, 0, 1, 8192, [8192]), 0, 0.0, 8192, 11)
    replica.add(turn)
    assert replica.advance(0.5) == [] and turn.first_token is None
    assert replica.advance(2.0) == [turn]
    assert turn.first_token == pytest.approx(8192 / PROMPT_TOKENS_PER_SECOND)
