"""The parts that benchmark scripts share."""

import os
import time

import pytest

from lockstep.bench.measurement import (
    Stopwatch,
    greedy_params,
    model_settings,
    parse_counts,
    percentile,
    print_json,
    speculative_config,
    start_server,
)


def test_counts_are_read_in_order() -> None:
    assert parse_counts("1,8,64") == (1, 8, 64)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_sleep_takes_wall_time_and_little_cpu_time() -> None:
    watch = Stopwatch()
    time.sleep(0.2)
    assert watch.wall >= 0.2
    assert 0 <= watch.cpu < 0.15


def test_settings_of_a_model_and_its_drafter() -> None:
    assert model_settings(None) == {"model": None, "load_format": "auto", "tensor_parallel_size": 1}
    assert model_settings("m") == {"model": "m", "load_format": "dummy", "tensor_parallel_size": 1}
    assert speculative_config("mtp", 0) is None
    assert speculative_config("mtp", 3, model="head") == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "adaptive": False,
        "model": "head",
    }
    assert greedy_params(7).max_tokens == 7


def test_a_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"rows": 1, "ms": 2.5})
    assert capsys.readouterr().out == '{"rows": 1, "ms": 2.5}\n'


def test_a_server_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="status 3"):
        start_server([], program=("-c", "import sys; sys.exit(3)"))


def test_a_server_has_the_given_variables() -> None:
    code = "import os; print('listens'); assert os.environ['ONE'] == 'a' and 'PATH' in os.environ"
    server = start_server([], program=("-c", code), environment={**os.environ, "ONE": "a"})
    assert server.stdout is not None
    server.stdout.close()
    assert server.wait(30) == 0
