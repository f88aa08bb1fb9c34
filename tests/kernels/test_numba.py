"""Numba kernels: the definition of their products, their functions, threads, and no Numba."""

import os
import subprocess
import sys
from dataclasses import is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from lockstep.kernels import Op
from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.arguments import fresh, outputs
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.backends import load, load_cases
from lockstep.kernels.drafting import mtp_inputs, next_draft_step, ngram_lookup
from lockstep.kernels.formats.weights import IntWeight
from lockstep.kernels.formats.weights.cases import random_weights
from lockstep.kernels.gated_delta_rule import gated_delta_step
from lockstep.kernels.linear import linear
from lockstep.kernels.linear.numba import linear_numba
from lockstep.kernels.linear.prepacked import fits_tiles
from lockstep.kernels.linear.tiled import TiledQuantizedWeight, TiledWeight
from lockstep.kernels.lora import lora
from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.sampling import cpu as sampling_cpu
from lockstep.kernels.sampling.reference import _best, sort_scores, uniform
from lockstep.kernels.simd import compiler, functions, vectors
from lockstep.kernels.step_metadata import advance_rows, prepare_step
from tests.kernels.backends import same_bits
from tests.kernels.test_prepacked import DTYPES, SHAPES, wide_range_rows

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 70)
"""Numbers of rows that reach every loop of the product, with its remainders."""


@compiler.kernel
def _exp(x, out, count):
    for i in range(0, count, vectors.LANES):
        value = functions.exp(vectors.vload_part(vectors.F32, x, i, count))
        vectors.vstore_part(vectors.F32, out, i, count, value)


@compiler.kernel
def _sigmoid(x, out, count):
    for i in range(0, count, vectors.LANES):
        value = functions.sigmoid(vectors.vload_part(vectors.F32, x, i, count))
        vectors.vstore_part(vectors.F32, out, i, count, value)


ELEMENTWISE = {"exp": _exp, "sigmoid": _sigmoid}


def apply(name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a function of vectors to x [N]."""
    out = torch.empty_like(x)
    ELEMENTWISE[name](x.data_ptr(), out.data_ptr(), len(x))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_product_is_one_ascending_chain(n: int, k: int, dtype: torch.dtype) -> None:
    """The definition in torch multiplies and adds one column after another."""
    x = wide_range_rows(70, k).to(dtype)
    weight = TiledWeight(torch.randn(n, k).to(dtype))
    expected = linear(x, weight)
    assert expected.shape == (70, n) and expected.dtype == dtype
    for rows in ROWS:
        for begin in {0, 70 - rows}:
            part = linear_numba(x[begin : begin + rows], weight)
            assert torch.equal(part, expected[begin : begin + rows]), (rows, begin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_is_independent_of_weight_slice_and_writes_its_columns_only(
    dtype: torch.dtype,
) -> None:
    x = wide_range_rows(9, 130).to(dtype)
    weight = torch.randn(96, 130).to(dtype)
    expected = linear_numba(x, weight)
    for begin, end in ((0, 1), (0, 8), (3, 20), (16, 48), (48, 96), (95, 96), (0, 95)):
        wide = torch.full((9, 120), float("nan"), dtype=dtype)
        out = wide[:, 5 : 5 + end - begin]
        linear_numba(x, TiledWeight(weight[begin:end]), out=out)
        assert torch.equal(out, expected[:, begin:end]), (begin, end)
        assert wide[:, :5].isnan().all() and wide[:, 5 + end - begin :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiled_weight_unpacks_exactly(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 40).to(dtype)
    tiled = TiledWeight(weight)
    assert torch.equal(tiled.plain(), weight) and torch.equal(tiled.rows(3, 9), weight[3:9])


QUANTIZED = {name: weight for name, weight in random_weights(70, 288) if fits_tiles(weight)}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tiles_have_the_bits_of_their_values(name: str) -> None:
    """Rows of every number, columns of a partial tile, and the values themselves."""
    weight = QUANTIZED[name]
    plain = weight.dequantize(torch.float32)
    quantized = TiledQuantizedWeight(weight)
    dense = TiledWeight(plain)
    assert same_bits(quantized.plain(), plain)
    assert quantized.nbytes < dense.nbytes / 2
    x = wide_range_rows(70, 288)
    for rows in ROWS:
        assert same_bits(quantized.multiply(x[:rows]), dense.multiply(x[:rows])), rows


def test_tiles_refuse_rows_of_another_width() -> None:
    weight = TiledWeight(torch.zeros(32, 48))
    with pytest.raises(ValueError, match="x: 47 columns; the weight has 48"):
        weight.multiply(torch.zeros(3, 47))


def test_formats_that_no_kernel_dequantizes() -> None:
    """Other formats, and groups or columns that a kernel would read past, are dequantized."""
    formats = dict(random_weights(70, 288))
    assert {"int4", "int4 asymmetric", "int8", "Q4_1", "Q4_K", "Q6_K", "MXFP4"} <= set(QUANTIZED)
    assert set(formats) - set(QUANTIZED) >= {"int4 desc_act", "fp8", "nvfp4"}
    assert not fits_tiles(IntWeight.empty(32, 272, group=16))
    assert not fits_tiles(IntWeight.empty(32, 288, group=24))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_of_special_values(dtype: torch.dtype) -> None:
    """Outputs round to nearest even as torch does: ties, overflow, subnormals, infinities, NaN."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, 65519.0, 65520.0, 1e-7, 6e-8, 2.9e-8, 1e38, 3.4e38, float("inf"),
         float("-inf"), float("nan"), 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40]
    )  # fmt: skip
    # Products of fp32 rows with a weight of 1 are the rows themselves.
    weight = TiledWeight(torch.ones(1, 1, dtype=dtype))
    outputs = linear_numba(values[:, None], weight)[:, 0]
    assert same_bits(outputs, values.to(dtype))


def test_exp_is_within_two_ulp() -> None:
    x = torch.cat([torch.linspace(-104, 88.7, 200_001), torch.linspace(-1e-3, 1e-3, 2001)])
    actual, expected = apply("exp", x), torch.exp(x.double())
    ulp = torch.maximum(2.0 ** (torch.log2(expected).floor() - 23), torch.tensor(2.0**-149))
    assert float(((actual.double() - expected).abs() / ulp).max()) <= 2


def test_exp_of_special_values() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, -1000.0, -104.5, 0.0, -0.0, 89.0, inf, nan])
    assert same_bits(apply("exp", x), torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, inf, inf, nan]))
    assert same_bits(apply("sigmoid", x), torch.tensor([0, 0, 0, 0.5, 0.5, 1, 1, nan]))


@pytest.mark.parametrize("count", [1, 15, 16, 511, 512, 513, 1024, 5000, 16400])
def test_largest_score_equals_torch(count: int) -> None:
    """Ties, in one block of 512 scores and across blocks, infinities and NaN at every kind of
    place."""
    scores = torch.randn(40, count).round(decimals=1)
    scores[1] = -torch.inf
    scores[2] = 0.0
    scores[3, -1] = torch.inf
    for row in range(4, 12):
        scores[row, row * count // 12] = torch.nan
    scores[12, :: max(1, count // 3)] = 9.0
    indices, tops = sampling_cpu._find_best(scores.view(8, 5, count))
    expected_indices, expected_tops = _best(scores.view(8, 5, count))
    is_nan = expected_tops.isnan()
    assert is_nan.sum() == 8 and same_bits(tops, expected_tops)
    assert torch.equal(indices[~is_nan], expected_indices[~is_nan])


@pytest.mark.parametrize("count", [1, 7, 4096])
def test_sorted_scores_equal_torch(count: int) -> None:
    """Ties, both zeros, infinities, subnormal numbers and NaN."""
    scores = torch.randn(12, count).round(decimals=1)
    scores[0] = -torch.inf
    scores[1] = 0.0
    scores[2, ::2] = -0.0
    scores[3, :: max(1, count // 3)] = torch.inf
    scores[4] *= 1e-40
    scores[5] *= 1e38
    for rows in (scores, scores[:1], scores.where(torch.rand(12, count) > 0.1, torch.nan)):
        ordered, indices = sort_scores(rows)
        actual_ordered, actual_indices = sampling_cpu._sort(rows)
        assert torch.equal(actual_indices, indices) and same_bits(actual_ordered, ordered)


def test_uniform_numbers_equal_torch() -> None:
    """Seeds of 64 bits, and token ids in any order."""
    ids = torch.randperm(5000)
    positions = torch.tensor([0, 1, 77, 2**31 - 1])
    for seed in (0, -1, 1 << 40, 12345):
        arguments = (torch.tensor([seed]), positions, ids)
        assert torch.equal(sampling_cpu._uniform(*arguments), uniform(*arguments)), seed


OPERANDS = {
    rms_norm: "weight",
    add_rms_norm: "delta weight",
    gated_rms_norm: "x gate weight",
    gated_group_norm: "x gate weight",
    silu_mul: "",
    relu2: "",
    rope_and_cache: "qkv k_weight sin positions slot_mapping v_cache",
    paged_attention: "v_cache page_table cu_seqlens starts",
    gated_delta_step: "mixed z b a weights.a_log weights.dt_bias weights.norm state.recurrent "
    "state.conv state.u state.k state.decay slots starts folded",
    linear: "",
    lora: "y x a b scales parts adapter_ids",
    mtp_inputs: "row_ids token_rows positions cu_seqlens accepted",
    next_draft_step: "computed folded drafts row_ids tokens page_table",
    ngram_lookup: "computed drafts",
    prepare_step: "row_ids state_src",
    advance_rows: "counts row_ids tokens drafts seq_lens",
}
"""Op -> operands that the sizes of others determine."""


def tensors_by_path(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of arguments by path, e.g. state.conv."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    parts = value if isinstance(value, dict) else vars(value) if is_dataclass(value) else {}
    paths = {name: f"{path}.{name}".lstrip(".") for name in parts}
    return {
        inner: x for name in parts for inner, x in tensors_by_path(parts[name], paths[name]).items()
    }


def replaced(arguments: dict[str, Any], path: str, x: torch.Tensor) -> dict[str, Any]:
    """Return a copy of arguments with another tensor at a path."""
    copied = fresh(arguments, "cpu")
    name, _, field = path.partition(".")
    # The constructor of a row table has checks of its own, which another test tests.
    owner = vars(copied[name]) if field else copied
    owner[field or name] = x
    return copied


def cases_of(op: Op) -> list[dict[str, Any]]:
    """Return the arguments of a few cases of an op."""
    load()
    return [arguments for _, arguments in islice(load_cases(op)(torch.float32), 3)]


def run_numba(op: Op, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run the backend of Numba kernels, which is a CPU's default, and return its outputs."""
    name = op.choose(device="cpu", dtype=torch.float32)
    return outputs(op, op.backends[name].run(**arguments), arguments)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return x in a layout in which no dimension's elements are consecutive."""
    wide = torch.empty(*x.shape, 2, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


OTHER_DTYPES = {
    torch.int32: torch.int64,
    torch.int64: torch.int32,
    torch.float32: torch.float16,
}


@pytest.mark.parametrize("op", OPERANDS, ids=lambda op: op.name)
@pytest.mark.parametrize("change", ["dtype", "layout"])
def test_operands_of_another_dtype_or_layout(op: Op, change: str) -> None:
    """They are converted or refused: a kernel never takes them for what they are not."""
    refused = 0
    for arguments in cases_of(op):
        expected = run_numba(op, fresh(arguments, "cpu"))
        for path, x in tensors_by_path(arguments).items():
            if x.dtype not in OTHER_DTYPES or path.startswith("table."):
                continue
            changed = x.to(OTHER_DTYPES[x.dtype]) if change == "dtype" else strided(x)
            copied = replaced(arguments, path, changed)
            try:
                results = run_numba(op, copied)
            except ValueError as error:
                assert "of torch." in str(error) or "loads" in str(error), (path, error)
                refused += 1
                continue
            if change == "layout" or not x.is_floating_point():
                assert results.keys() == expected.keys()
                for name, result in results.items():
                    assert same_bits(result, expected[name].to(result.dtype)), (path, name)
    assert refused or not OPERANDS[op] or change == "layout"


@pytest.mark.parametrize("op", OPERANDS, ids=lambda op: op.name)
def test_operands_that_are_too_short(op: Op) -> None:
    """A kernel would read and write past their end."""
    cases = {sum(x.numel() for x in tensors_by_path(c).values()): c for c in cases_of(op)}
    arguments = cases[max(cases)]
    tensors = tensors_by_path(arguments)
    for path in OPERANDS[op].split():
        with pytest.raises(ValueError, match=r"[Tt]he kernel reads|do not fit"):
            run_numba(op, replaced(arguments, path, tensors[path][:-1].clone()))


def test_row_tables_are_of_the_widths_and_rows_that_kernels_read() -> None:
    load()
    _, arguments = next(iter(load_cases(prepare_step)(torch.float32)))
    table = arguments["table"]
    for name, x in vars(table).items():
        with pytest.raises(ValueError, match=name):
            replace(table, **{name: x.to(torch.int16)})
        # The number of tokens' rows is the one that the others must have.
        with pytest.raises(ValueError, match="prompt_len" if name == "tokens" else name):
            replace(table, **{name: x[:-1]})


def test_thread_count_changes_no_bit() -> None:
    x = torch.randn(33, 300)
    weight = TiledWeight(torch.randn(1000, 300))
    batch = paged(((0, 40), (300, 9), (0, 0), (5, 1)), 6, 2, 32, 16, torch.float32)
    attend = paged_attention.backends["numba"].run
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((linear_numba(x, weight), attend(**batch)))
    finally:
        torch.set_num_threads(before)
    for product, attended in results[1:]:
        assert torch.equal(product, results[0][0]) and torch.equal(attended, results[0][1])


LARGE_SCRATCH = {
    "paged_attention": (
        "from lockstep.kernels.attention.cases import paged\n"
        "arguments = paged(((0, 3),), 1, 1, 20000, 16, torch.float32)\n"
    ),
    "gated_delta_step": (
        "from lockstep.kernels.gated_delta_rule.cases import gated_delta_step_cases\n"
        "from lockstep.kernels.recurrent.cases import Dims\n"
        "cases = gated_delta_step_cases(torch.float32, (Dims(1, 4, 128, 256),))\n"
        "arguments = next(c for _, c in cases if len(c['slots']))\n"
    ),
    "lora": (
        "arguments = dict(\n"
        "    y=torch.zeros(2, 8), x=torch.ones(2, 200000), a=torch.ones(2, 1, 200000),\n"
        "    b=torch.ones(2, 1, 8), scales=torch.ones(2, 1), parts=torch.zeros(8).int(),\n"
        "    adapter_ids=torch.ones(2).int(),\n"
        ")\n"
    ),
    "linear": (
        "from lockstep.kernels.linear.tiled import TiledWeight\n"
        "weight = TiledWeight(torch.ones(40, 20000, dtype=torch.bfloat16))\n"
        "arguments = dict(x=torch.ones(16, 20000, dtype=torch.bfloat16), weight=weight)\n"
    ),
}
"""Op -> program that makes arguments for which its kernel allocates more than 200 KB."""


RUN_FORKED = """
import os, sys, torch
from lockstep.kernels.backends import all_ops, load
load()
for name, code in {programs}.items():
    if not (pid := os.fork()):
        exec(code)
        all_ops()[name].backends["numba"].run(**arguments)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        print(name, "ended with", status)
"""
"""Program that runs each op in a process of its own, forked since imports take longest."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc returns memory at once")
def test_kernels_keep_their_memory_while_they_use_it() -> None:
    """A write to memory that is freed already ends the process, since malloc has unmapped it."""
    unmaps = dict(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    command = [sys.executable, "-c", RUN_FORKED.format(programs=LARGE_SCRATCH)]
    done = subprocess.run(
        command, check=True, env=os.environ | unmaps, stdout=subprocess.PIPE, text=True
    )
    assert not done.stdout, done.stdout


@pytest.mark.parametrize("dim", [1, 17, 40, 56, 80, 120])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_every_remainder_of_dims(dim: int, dtype: torch.dtype) -> None:
    """Values are added 64 dims at a time: the last 64 may end in any of their four vectors."""
    batch = paged(((0, 40), (300, 9)), 6, 2, dim, 16, dtype)
    actual = paged_attention.backends["numba"].run(**batch)
    expected = paged_attention.reference(**batch)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_attention_leaves_padding_tokens_alone() -> None:
    """A padded step has more tokens than its rows: no row's lengths may be read past the last."""
    batch = paged(((0, 3), (300, 2)), 4, 2, 32, 16, torch.float32)
    attend = paged_attention.backends["numba"].run
    expected = attend(**batch)
    q = torch.cat([batch["q"], torch.full((60, 4, 32), float("nan"))])
    assert torch.equal(attend(**batch | {"q": q})[:5], expected)


LOADS_TORCH_BACKENDS = (
    "import torch\n"
    "from lockstep.kernels.backends import load\n"
    "from lockstep.kernels.linear import linear\n"
    "from lockstep.worker.build import numerics\n"
    "from concurrent.futures import ThreadPoolExecutor as Pool\n"
    "list(Pool(4).map(lambda _: load(), range(8)))\n"
    "assert linear.choose(device='cpu', dtype=torch.float32) == 'cpu', linear.backends\n"
    "assert 'numba' not in numerics('cpu', torch.float32)\n"
)
"""Program in which threads load backends at once, as ranks in threads do; torch's are chosen."""


def test_backends_load_without_numba() -> None:
    """Without Numba, torch's backends serve, and numerics does not name it."""
    code = "import sys; sys.modules['numba'] = sys.modules['llvmlite'] = None\n"
    subprocess.run([sys.executable, "-c", code + LOADS_TORCH_BACKENDS], check=True)


def test_backends_load_next_to_a_numba_that_cannot_be_imported(tmp_path: Path) -> None:
    """A NumPy that Numba does not support takes away its kernels, with one warning."""
    reason = "Numba needs NumPy 2.4 or less. Got NumPy 2.5."
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(f"raise ImportError({reason!r})\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + LOADS_TORCH_BACKENDS
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stderr=subprocess.PIPE, text=True
    )
    assert done.stderr.count(reason) == 1 and "pip install" in done.stderr, done.stderr
