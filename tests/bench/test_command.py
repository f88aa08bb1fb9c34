"""The commands of lockstep bench: default subcommand, floor, trace, kernels, bounds of options."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lockstep.bench import kernels
from lockstep.cli import app
from lockstep.errors import ConfigError, brief
from lockstep.worker import executor
from tests.thread_ranks import ThreadRanks
from tests.tiny_model import TWO_LAYERS, make_model

SMALL = ("--batch-size", "2", "--input-len", "70", "--output-len", "6")
ONCE = ("--num-iters-warmup", "0", "--num-iters", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = make_model(tmp_path_factory.mktemp("model"), **TWO_LAYERS)
    return str(folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("bench", *arguments), catch_exceptions=False)


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0
    return json.loads(result.stdout.splitlines()[-1])


def test_offline_is_the_default_subcommand(model: str) -> None:
    arguments = ("--model", model, "--load-format", "dummy", *SMALL, *ONCE, "--json")
    plain = last_line(run(*arguments))
    named = last_line(run("offline", *arguments))
    assert plain["bench"] == named["bench"] == "offline" and plain["tokens"] == 12
    assert "floor_ms" not in plain
    assert "kernels" in run("--help").output


def test_floor_alone_without_weights(model: str) -> None:
    output = run("--floor", model, "--num-speculative-tokens", "2", *SMALL)
    result = last_line(output)
    assert result["bench"] == "floor" and result["dtype"] == "bfloat16"
    assert (result["rows"], result["query_len"], result["context"]) == (2, 3, 70)
    assert result["floor_ms"] >= result["verify_floor_ms"] and result["bytes"] > 0
    assert "GatedDeltaNet" in output.stdout and "has no weights" in output.stderr


def test_floor_with_a_run(model: str) -> None:
    output = run(model, "--floor", "--load-format", "dummy", *SMALL, *ONCE)
    result = last_line(output)
    assert result["bench"] == "offline" and result["context"] == 73
    assert result["over_floor"] == pytest.approx(
        result["ms_per_step"] / result["floor_ms"], rel=0.05
    )
    assert "measured / floor" in output.stdout


def test_floor_alone_of_a_rank(model: str) -> None:
    one_rank, rank = (
        last_line(run("--floor", model, *SMALL, "--json", "--tensor-parallel-size", size))
        for size in ("1", "2")
    )
    assert (one_rank["exchanges"], one_rank["exchanged_bytes"]) == (0, 0)
    assert rank["tensor_parallel_size"] == 2 and rank["exchanges"] > 8
    # A vocabulary this small is whole on both ranks.
    assert rank["bytes"] < 0.8 * one_rank["bytes"]


def test_a_run_on_two_ranks_shows_the_times_of_both(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    output = run(model, "--floor", "--load-format", "dummy", *SMALL, *ONCE, "-tp", "2")
    result = last_line(output)
    assert result["tensor_parallel_size"] == len(result["rank_step_ms"]) == 2
    assert all(ms > 0 for ms in result["rank_step_ms"]), result["rank_step_ms"]
    assert "on the ranks, min / max" in output.stdout and "2 ranks" in output.stdout
    assert re.search(r"verify: \d+ exchanges", output.stdout)


@pytest.mark.parametrize(("count", "query_len"), [("0", 1), ("5", 6)])
def test_number_of_drafts(model: str, count: str, query_len: int) -> None:
    result = last_line(run("--floor", model, "--num-speculative-tokens", count, "--json"))
    assert result["query_len"] == query_len


def test_drafts_need_a_drafter(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model", mtp_num_hidden_layers=0))
    with pytest.raises(ConfigError, match="needs a drafter"):
        run("--floor", folder, "--num-speculative-tokens", "2")


def test_trace_is_written_and_shown(model: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    output = run(model, "--trace", str(path), "--load-format", "dummy", *SMALL)
    result = last_line(output)
    assert result["bench"] == "trace" and result["file"] == str(path)
    assert {"step", "blocks.*.mlp.down"} <= {line["name"] for line in result["lines"]}
    assert json.loads(path.read_text())["traceEvents"] and "Time of a step" in output.stdout


def test_kernels_status_table_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "kernels",
        "--rows",
        "1,4",
        "--query-len",
        "2",
        "--op",
        "linear",
        "--device",
        "cpu",
    )
    monkeypatch.setitem(kernels.REPEATS, "cpu", 1)
    output = run(*arguments)
    result = last_line(output)
    assert result["bench"] == "kernels" and not result["differing"] and "equal" in output.stdout
    assert {line["size"].split()[-1] for line in result["lines"]} >= {"256x512", "4096x256"}
    monkeypatch.setattr(kernels, "compare_rows", lambda *args: ((1, 2), (2,)))
    tampered = run(*arguments, "--json")
    assert tampered.exit_code == 1 and json.loads(tampered.stdout)["differing"]


@pytest.mark.parametrize("rows", ["", "0", "1;2", "one"])
def test_kernels_refuses_rows(rows: str) -> None:
    with pytest.raises(ConfigError, match="whole numbers from 1"):
        run("kernels", "--rows", rows, "--device", "cpu")


def test_kernels_at_a_context_and_in_a_kv_format() -> None:
    sizes = ("--rows", "1", "--query-len", "4", "--context", "100", "--device", "cpu")
    arguments = ("kernels", "--op", "latent_attention", *sizes, "--json")
    (plain,) = last_line(run(*arguments))["lines"]
    (quantized,) = last_line(run(*arguments, "--kv-cache-dtype", "fp8"))["lines"]
    assert plain["bytes"] - quantized["bytes"] == 100 * (4 * 64 - (64 + 4))
    assert "context 100" in plain["size"] and "context 100" in quantized["size"]
    with pytest.raises(ConfigError, match="--context 100 is less than a row's tokens"):
        run(*arguments, "--query-len", "101")
    with pytest.raises(ConfigError, match="allowed: auto, bfloat16, fp8"):
        run(*arguments, "--kv-cache-dtype", "turboquant_k8v4")


def test_synthetic_acceptance(model: str) -> None:
    arguments = (
        model,
        *SMALL,
        *ONCE,
        "--synthetic-acceptance",
        "1",
        "--num-speculative-tokens",
        "2",
    )
    result = last_line(run(*arguments, "--load-format", "dummy", "--json"))
    spec = result["speculative_config"]
    assert spec["synthetic_acceptance"] == 1.0 and not spec["adaptive"], "K in every step"
    assert result["acceptance_length"] == 3.0, "1 + p + p^2"
    assert result["acceptance_rate"] == 1.0 and "synthetic" in result["numerics"]
    with pytest.raises(ConfigError, match="needs a drafter"):
        run(model, "--synthetic-acceptance", "0.5", "--num-speculative-tokens", "0")
    with pytest.raises(ConfigError, match="load_format"):
        run("--synthetic-acceptance", "0.5", "--json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels", "--rows", "9223372036854775808"), "rows='.*1 to 65536"),
        (("kernels", "--query-len", "0"), "query_len='0' is not allowed"),
        (("serving", "--concurrency", "9" * 99), "concurrency='9.*1 to 4096"),
        (("serving", "--rate", "inf"), "rate='inf' is not allowed"),
        (("serving", "--api-key", "\udcff"), "api_key .*printable ASCII"),
        (("offline", "--trace", "x" * 9_999), "trace='x.*File name too long"),
        (("offline", "--trace", "/"), "trace='/' is not allowed"),
        (("drafters", "--plot", "/none/a.png"), "plot='/none/a.png' is not .*No such file"),
        (("serving", "--plot", "a.pdf"), "plot='a.pdf' is not allowed; allowed: .*png"),
    ],
)
def test_invalid_values_are_refused_before_loading(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("offline", "--input-len", "-1"),
        ("offline", "--output-len", "0"),
        ("offline", "--temperature", "-1"),
        ("offline", "--num-iters", "9" * 20),
        ("drafters", "--output-len", "9" * 20),
        ("serving", "--timeout", "-1"),
        ("serving", "--timeout", "1e400"),
        ("serving", "--vocab-size", "0"),
        ("serving", "--num-requests", "9" * 20),
    ],
)
def test_numbers_have_bounds(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{arguments[1]}={brief(arguments[2])} is not allowed: "):
        run(*arguments)
