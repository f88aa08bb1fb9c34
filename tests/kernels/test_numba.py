"""Numba kernels: the definition of their products, their functions, threads, and no Numba."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from lockstep.kernels import Op
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
from lockstep.kernels.sampling import cpu as sampling_cpu
from lockstep.kernels.sampling.reference import _best, uniform
from lockstep.kernels.simd import compiler, functions, vectors
from lockstep.kernels.step_metadata import advance_rows, prepare_step
from tests.forked_processes import ForkedProgram
from tests.kernels.backends import same_bits
from tests.kernels.test_prepacked import DTYPES, SHAPES, wide_range_rows

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 70)
"""Numbers of rows that reach every loop of the product, with its remainders."""


def _make_elementwise(function):
    @compiler.kernel
    def elementwise(x, out, count):
        for i in range(0, count, vectors.LANES):
            value = function(vectors.vload_part(vectors.F32, x, i, count))
            vectors.vstore_part(vectors.F32, out, i, count, value)

    return elementwise


ELEMENTWISE = {f.__name__: _make_elementwise(f) for f in (functions.exp, functions.sigmoid)}


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


def test_uniform_numbers_equal_torch() -> None:
    """Seeds of 64 bits, and token ids in any order."""
    ids = torch.randperm(5000)
    positions = torch.tensor([0, 1, 77, 2**31 - 1])
    for seed in (0, -1, 1 << 40, 12345):
        arguments = (torch.tensor([seed]), positions, ids)
        assert torch.equal(sampling_cpu._uniform(*arguments), uniform(*arguments)), seed


@pytest.mark.parametrize(
    "op",
    [mtp_inputs, next_draft_step, ngram_lookup, prepare_step, advance_rows, gated_delta_step],
    ids=lambda op: op.name,
)
def test_kernels_of_addresses_refuse_integers_of_another_width(op: Op) -> None:
    """They would read other numbers, and write out of bounds."""
    load()
    run = op.backends[op.choose(device="cpu")].run
    other = {torch.int32: torch.int64, torch.int64: torch.int32}
    _, arguments = next(iter(load_cases(op)(torch.float32)))
    numbers = {
        name: x.to(other[x.dtype])
        for name, x in arguments.items()
        if isinstance(x, torch.Tensor) and x.dtype in other
    }
    assert numbers
    for name, x in numbers.items():
        with pytest.raises(AssertionError, match=str(x.dtype)):
            run(**arguments | {name: x})


def test_row_tables_are_of_the_widths_that_kernels_read() -> None:
    load()
    _, arguments = next(iter(load_cases(prepare_step)(torch.float32)))
    table = arguments["table"]
    for name, x in vars(table).items():
        with pytest.raises(AssertionError, match=name):
            replace(table, **{name: x.to(torch.int16)})


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


def test_kernels_on_disk_depend_on_the_files_that_they_inline() -> None:
    """An edit of a function that kernels inline must not leave old machine code in use."""
    stamp = ELEMENTWISE["exp"]._cache._cache_file._source_stamp
    assert stamp[1] == compiler._inlined_stamp()
    names = {name for name, *_ in stamp[1]}
    assert names >= {"simd/vectors.py", "simd/functions.py", "simd/compiler.py"}
    # rotary and gated_delta_rule inline its norm_row and gated_norm_row.
    assert "norm/numba_kernels.py" in names


CALLS_A_KERNEL = """
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
from kernel_of_two_processes import double

compile_double = double._compiler.compile


def compile_slowly(*arguments):
    time.sleep(1)  # so that both processes compile at the same time, if nothing prevents it
    return compile_double(*arguments)


double._compiler.compile = compile_slowly
(folder / f"ready_{sys.argv[2]}").touch()
while len(list(folder.glob("ready_*"))) < 2:
    time.sleep(0.01)
assert double(21) == 42
print(sum(double.stats.cache_misses.values()), sum(double.stats.cache_hits.values()))
"""


def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path) -> None:
    """The second process loads what the first one keeps."""
    (tmp_path / "kernel_of_two_processes.py").write_text(
        "from lockstep.kernels.simd.compiler import kernel\n"
        "@kernel\n"
        "def double(x):\n"
        "    return 2 * x\n"
    )
    programs = [ForkedProgram(CALLS_A_KERNEL, [str(tmp_path), index]) for index in "01"]
    outputs = [program.communicate() for program in programs]
    assert sorted(outputs) == [("0 1\n", ""), ("1 0\n", "")]


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
