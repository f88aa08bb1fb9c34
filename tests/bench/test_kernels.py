"""Kernel benchmarks count their bytes, read distinct memory and detect batch-dependent bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.bench.dimensions import MODELS, bench_env
from lockstep.bench.floor import sketch
from lockstep.bench.kernels import (
    _chain,
    benchmarks,
    compare_rows,
    measure_kernels,
    measured_ops,
    pick_models,
)
from lockstep.errors import ConfigError
from lockstep.kernels.bench_types import Cost, OpBenchmark
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.layers.linear import Gemm
from tests.bench.test_floor import LARGE_CONFIG
from tests.tiny_model import make_model

SMALL = MODELS["small"]
CPU_ENV = bench_env("cpu", torch.float32, 8)


Calls = list[tuple[int, ...]]


def counting_benchmark(rows: int, row_bytes: int, variants: int = 1) -> tuple[OpBenchmark, Calls]:
    """Return a benchmark whose outputs are row numbers, and the list of its calls."""
    calls: Calls = []

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        calls.append((begin, end, variant))
        return lambda: torch.arange(begin, end)[:, None] * torch.ones(2)

    cost = lambda count: Cost(count * row_bytes)  # noqa: E731
    return OpBenchmark("count", "2", 1, "none", rows, call, cost, variants), calls


@pytest.mark.slow
def test_every_op_is_measured_and_equal_at_other_rows() -> None:
    lines = list(measure_kernels([SMALL], "cpu", torch.float32, (1, 8), (1, 3), repeats=1))
    assert {line.op for line in lines} == set(measured_ops())
    for line in lines:
        assert line.us > 0 and line.tb_per_s == pytest.approx(line.bytes / line.us / 1e6)
        assert line.compared == (1, 2, 3, 7) and line.differing == (), line
    sizes = {(line.rows, line.query_len) for line in lines if line.op == "gated_delta_step"}
    assert sizes == {(1, 1), (8, 1), (1, 3), (8, 3)}


@pytest.mark.slow
def test_bytes_by_hand() -> None:
    by_op = {s.op + s.size.split()[0]: s for s in benchmarks(SMALL, CPU_ENV, 2)}
    assert by_op["lineardown"].cost(4).bytes == 4 * (256 * 512 + 8 * (256 + 512))
    assert by_op["lineardown"].cost(4).flops == 2 * 256 * 512 * 8
    assert by_op["rms_norm256"].cost(3).bytes == 2 * 4 * 3 * 2 * 256
    assert by_op["add_rms_norm256"].cost(3).bytes == 4 * 4 * 3 * 2 * 256
    assert by_op["silu_mul512"].cost(1).bytes == 3 * 4 * 2 * 512
    assert by_op["rope_and_cache4/2x64"].cost(1).bytes == 2 * 4 * 2 * (4 + 2 * 2) * 64
    kv = 2 * 300 * 2 * 64
    q = 2 * 2 * 4 * 64
    assert by_op["paged_attention4/2x64,"].cost(5).bytes == 5 * 4 * (kv + q)
    tokens = 2 * 4 * (64 + 16 + 64)
    assert by_op["latent_attention4"].cost(5).bytes == 5 * 4 * (300 * (64 + 16) + tokens)
    assert by_op["latent_attention4"].cost(5).flops == 10 * 300 * 4 * 2 * (64 + 16 + 64)
    assert by_op["latent_rope_and_cache4"].cost(3).bytes == 2 * 4 * 6 * (64 + 16 + 4 * 16)
    assert by_op["head_linear4x32"].cost(3).bytes == 4 * (4 * 32 * 64 + 6 * 4 * (32 + 64))
    channels = 2 * 2 * 32 + 4 * 32
    slot = 4 * (4 * 32 * 32 + 2 * (channels + 4 * 32 + 2 * 32 + 4))
    io_bytes = 2 * 4 * (channels + 4 * 32 + 2 * 4)
    out = 2 * 4 * 4 * 32
    assert by_op["gated_delta_step2/4x32x32"].cost(3).bytes == 3 * (2 * slot + io_bytes + out)
    narrow = slot - 2 * 4 * 32 * 32
    assert by_op["gated_delta_step2/4x32x32,"].cost(3).bytes == 3 * (2 * narrow + io_bytes + out)
    channels = 2 * 2 * 32 + 4 * 16
    slot = 4 * (4 * 32 * 16 + 2 * (channels + 4 * 16 + 2 * 32 + 4))
    total = 2 * slot + 2 * 4 * (channels + 4 + 4 * 16)
    assert by_op["mamba2_step2/4x32x16"].cost(3).bytes == 3 * total
    assert by_op["gated_group_norm2x32"].cost(3).bytes == 3 * 2 * (4 * 16) * (4 + 2 * 4)
    assert by_op["relu2512"].cost(1).bytes == 2 * 4 * 2 * 512
    assert by_op["route12/3"].cost(5).bytes == 10 * (4 * 12 + (4 + 4) * 3)
    expert = 4 * 3 * 256 * 64
    io_bytes = 2 * ((3 * 256 + 1) * 4 + 3 * (4 + 4))
    read = (by_op["experts256/64,"].cost(1).bytes - io_bytes) / expert
    assert read in (3, 4, 5, 6), "two tokens choose three experts each"
    assert by_op["experts256/64,"].cost(5).flops == 10 * 3 * 6 * 256 * 64
    assert by_op["samplegreedy,"].cost(3).bytes == 3 * 2 * 4 * 4096


@pytest.mark.parametrize(
    ("name", "key", "latent"),
    [("fp8", 64, 64 + 4), ("int8_per_token_head", 64 + 4, 64 + 4), ("turboquant_4bit_nc", 34, 34)],
)
def test_quantized_caches_are_measured(name: str, key: int, latent: int) -> None:
    """Bytes follow from a quantized token: key and value of 64 elements each, or a latent of 64.

    The rotary key of 16 elements of a latent is not quantized.
    """
    env = bench_env("cpu", torch.float32, 8, KV_FORMATS[name])
    ops = ("paged_attention", "latent_attention", "latent_rope_and_cache")
    by_op = {s.op: s for s in benchmarks(SMALL, env, 2, ops)}
    kv = 300 * 2 * 2 * key
    assert by_op["paged_attention"].cost(5).bytes == 5 * (kv + 4 * 2 * 2 * 4 * 64)
    token_bytes = latent + 4 * 16
    tokens = 2 * 4 * (64 + 16 + 64)
    assert by_op["latent_attention"].cost(5).bytes == 5 * (300 * token_bytes + 4 * tokens)
    assert by_op["latent_rope_and_cache"].cost(3).bytes == 6 * (
        token_bytes + 4 * (64 + 16) + 2 * 4 * 4 * 16
    )
    for benchmark in by_op.values():
        assert compare_rows(benchmark, (1, 5), 8)[1] == ()


def test_dimensions_are_those_of_the_model(tmp_path: Path) -> None:
    model = sketch(make_model(tmp_path / "large", **LARGE_CONFIG), torch.bfloat16, None).model
    assert {m.shape for m in model.modules() if isinstance(m, Gemm)} == {
        (n, k) for _, n, k in MODELS["Qwen3.6-27B"].weights
    }


def test_batch_dependent_bit_is_detected() -> None:
    correct, _ = counting_benchmark(64, 100)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        return lambda: correct.call(begin, end, variant)() * (1 + 1e-7 * (end - begin == 3))

    wrong = OpBenchmark("count", "2", 1, "none", 64, call, correct.cost)
    assert compare_rows(correct, (1, 2, 3, 64), 64) == ((1, 2, 3), ())
    assert compare_rows(wrong, (1, 2, 3, 64), 64) == ((1, 2, 3), (3,))


def test_state_is_reset_between_comparisons() -> None:
    benchmark = next(iter(benchmarks(SMALL, CPU_ENV, 2, ["gated_delta_step"])))
    benchmark.call(0, 8, 0)()
    dirty_state = benchmark.outputs(0, 8, torch.zeros(8))
    benchmark.reset()
    clean_state = benchmark.outputs(0, 8, torch.zeros(8))
    assert any(not torch.equal(a, b) for a, b in zip(dirty_state, clean_state, strict=True))
    assert compare_rows(benchmark, (1, 5), 8)[1] == ()


def test_chain_reads_distinct_memory() -> None:
    benchmark, calls = counting_benchmark(rows=64, row_bytes=CPU_ENV.chain_bytes // 64)
    _chain(benchmark, 8, CPU_ENV)
    assert [(begin, end) for begin, end, _ in calls] == [(i, i + 8) for i in range(0, 64, 8)]
    weights, calls = counting_benchmark(rows=8, row_bytes=CPU_ENV.chain_bytes // 32, variants=5)
    _chain(weights, 8, CPU_ENV)
    assert [variant for *_, variant in calls] == [0, 1, 2, 3]


def test_models_are_chosen_by_device_and_name() -> None:
    assert [m.name for m in pick_models([], "cpu")] == ["small"]
    large = [
        "Qwen3-8B",
        "Qwen3.6-27B",
        "Qwen3.6-35B-A3B",
        "DeepSeek-V3",
        "Nemotron-3-Nano-30B-A3B",
    ]
    assert [m.name for m in pick_models([], "cuda")] == large
    with pytest.raises(ConfigError, match="allowed: Qwen3-8B"):
        pick_models(["GPT"], "cpu")
    with pytest.raises(ConfigError, match="op='gemm' is not allowed"):
        next(measure_kernels([SMALL], "cpu", torch.float32, only=["gemm"]))


@pytest.mark.gpu
def test_real_dimensions_on_a_gpu() -> None:
    models = [MODELS["Qwen3.6-27B"]]
    lines = list(
        measure_kernels(models, "cuda", torch.bfloat16, (1, 8), (4,), ("linear", "rms_norm"))
    )
    assert sum(line.backend != "quantized" for line in lines) == 16
    assert any(line.backend == "quantized" for line in lines)
    assert not any(line.differing for line in lines)
    assert max(line.of_floor for line in lines) < 1.1
