"""Kernels compile for GPUs without one: everything that ops launch, and the recurrent form with odd
widths."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.kernels.architecture import ARCHITECTURES
from lockstep.kernels.backends import all_ops
from tests.forked_processes import fork_context
from tests.kernels.backends import OPS
from tests.kernels.compiling import run

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")


@pytest.fixture
def compile_module(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that runs a module of this folder in its own process and returns its
    printed lines.

    Compiled code stays in Triton's cache, under a hash of Triton, source, target and options, so
    the next run (of another clone too) compiles only what has changed.
    """

    def lines(module: str, *arguments: str) -> list[str]:
        out = tmp_path / "out"
        errors = tmp_path / "errors"
        inputs = (module, list(arguments), str(out), str(errors))
        process = fork_context().Process(target=run, args=inputs)
        process.start()
        process.join()
        assert process.exitcode == 0, errors.read_text()[-3000:]
        return out.read_text().splitlines()

    return lines


QUICK = pytest.param(["--quick"], id="quick")
ALL = pytest.param([], id="all", marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_recurrent_step_kernels_compile_for_hopper(
    options: list[str], compile_module: Callable[..., list[str]]
) -> None:
    """Eleven kernels per layer of the delta rule (the step for each window and state dtype, the
    others for committed windows too): of one layer, or of all three; and of Mamba-2's two layers
    only the step kernel."""
    assert len(compile_module("compiles", *options)) == (11 if options else 45)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_every_op_compiles_for_hopper(
    options: list[str], compile_module: Callable[..., list[str]]
) -> None:
    """Every op with a Triton backend: its first case, or the first case of each combination of
    absent arguments."""
    lines = compile_module("compile_launches", *options)
    assert [line.split()[0] for line in lines] == list(all_ops())


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_shards_of_a_vocabulary_add_as_a_single_rank(
    options: list[str], compile_module: Callable[..., list[str]]
) -> None:
    """Sampling kernels of ranks that share logit rows have the sums of a single rank's, in the same
    layouts, also where rows are not aligned."""
    assert len(compile_module("compile_shards", *options)) == (2 if options else 8)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_experts_use_wgmma_for_any_token_count(
    options: list[str], compile_module: Callable[..., list[str]]
) -> None:
    """Keeps one K order for weights that are dequantized in registers (docs/kernels/experts.md):
    int4, or dense, int4 with large scales, fp8 and NVFP4 too; two products in each of two forms."""
    assert len(compile_module("compile_experts", *options)) == (4 if options else 20)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_fp8_products_are_added_in_fp32(
    options: list[str], compile_module: Callable[..., list[str]]
) -> None:
    """Five numbers of tokens, each on the same instruction: on Hopper with a scale per block, or on
    two architectures with both kinds of scales."""
    assert len(compile_module("compile_fp8", *options)) == (15 if options else 40)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_latent_attention_on_hopper_does_not_spill(
    options: list[str], compile_module: Callable[..., list[str]]
) -> None:
    """The loop over a tile must not spill; the end of a split may."""
    assert len(compile_module("compile_latents", *options)) == (1 if options else 6)


@pytest.mark.parametrize("name", ["sm_86", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_every_op_compiles_for_smallest_shared_memory(
    name: str, compile_module: Callable[..., list[str]]
) -> None:
    """Each op once for the two architectures with the least shared memory, below and above
    Hopper. The bytes are known before machine code."""
    lines = compile_module("architectures", "--quick", name)
    actual = {line.split()[1] for line in lines if line.startswith(name)}
    assert actual == {op.name for op in OPS}


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in ARCHITECTURES.values()])
def test_every_tile_compiles_and_fits_shared_memory(
    name: str, compile_module: Callable[..., list[str]]
) -> None:
    """Compile all launches of an architecture, at the sizes of real models too."""
    assert {line.split()[1] for line in compile_module("architectures", name)} == {
        op.name for op in OPS
    }


def test_quantized_weights_keep_natural_k_order(
    compile_module: Callable[[str], list[str]],
) -> None:
    """kWidth 2 on Hopper and Ampere, and on Hopper no second pass through shared memory."""
    assert len(compile_module("compile_quantized")) == 11


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param(["--quick"], 8, id="quick"),
        pytest.param([], 48, id="all", marks=pytest.mark.slow),
    ],
)
def test_pipeline_kernels_do_not_spill(
    options: list[str], count: int, compile_module: Callable[..., list[str]]
) -> None:
    """On Hopper, for 8, 64, 128 and 256 tokens, with one tile per CTA and with stream-K: all of
    six layouts, or each number of tokens once."""
    assert len(compile_module("compile_quantized", "--pipeline", *options)) == count


@pytest.mark.slow
def test_gemv_kernels_do_not_spill(
    compile_module: Callable[..., list[str]],
) -> None:
    """Every candidate of one layout and one of each other, on three architectures."""
    assert len(compile_module("compile_quantized", "--gemv")) >= 23


@pytest.mark.parametrize(
    ("arch", "count", "options"),
    [
        pytest.param("86", 7, ["--quick"], id="sm_86-quick"),
        pytest.param("90", 8, ["--quick"], id="sm_90-quick"),
        pytest.param("86", 41, [], id="sm_86", marks=pytest.mark.slow),
        pytest.param("90", 61, [], id="sm_90", marks=pytest.mark.slow),
    ],
)
def test_quantized_caches_keep_natural_k_order(
    arch: str, count: int, options: list[str], compile_module: Callable[..., list[str]]
) -> None:
    """On Hopper and on an mma.sync architecture, in every format, or each format on one of them."""
    lines = compile_module("compile_kv", *options, arch)
    assert len(lines) == count and {line.split()[0] for line in lines} == {arch}
