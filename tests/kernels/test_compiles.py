"""Kernels compile for a GPU: all that ops launch; the stepping law's with widths that differ."""

import multiprocessing
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from lockstep.kernels.architecture import ARCHITECTURES
from tests.kernels.backends import OPS
from tests.kernels.compiling import run

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")


COMMON = "tests.kernels.compiler_imports"


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Processes in which the interpreter has not taken the kernels' place, as it may have in this
    one. They are forked off one that has imported COMMON: that takes seconds.

    What is compiled stays in Triton's cache, under a hash of Triton, source, target and options:
    the next run, of another clone too, compiles what has changed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([COMMON])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        forkserver.ensure_running()
    return context


@pytest.fixture
def compiled(processes: ForkServerContext, tmp_path: Path) -> Callable[..., list[str]]:
    """The lines that a module of this folder prints, run in a process of its own."""

    def lines(module: str, *arguments: str) -> list[str]:
        out = tmp_path / "out"
        errors = tmp_path / "errors"
        given = (module, list(arguments), str(out), str(errors))
        process = processes.Process(target=run, args=given)
        process.start()
        process.join()
        assert process.exitcode == 0, errors.read_text()[-3000:]
        return out.read_text().splitlines()

    return lines


QUICK = pytest.param(["--quick"], id="quick")
ALL = pytest.param([], id="all", marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_stepping_kernels_compile_for_hopper(
    options: list[str], compiled: Callable[..., list[str]]
) -> None:
    """Six kernels of a layer of the delta rule, the walk by windows and states: of one layer, and
    of all three; of Mamba-2's two layers the walk alone."""
    assert len(compiled("compiles", *options)) == (6 if options else 26)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_what_every_op_launches_compiles_for_hopper(
    options: list[str], compiled: Callable[..., list[str]]
) -> None:
    """Every op with a Triton backend, by its first case; and by all in which others are None."""
    lines = compiled("compile_launches", *options)
    assert [line.split()[0] for line in lines] == [op.name for op in OPS]


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_experts_multiply_by_wgmma_at_any_number_of_tokens(
    options: list[str], compiled: Callable[..., list[str]]
) -> None:
    """So a weight that is unpacked in registers keeps one K order (docs/kernels/experts.md): int4,
    and plain, fp8 and NVFP4 too, two products in each of two forms."""
    assert len(compiled("compile_experts", *options)) == (4 if options else 16)


@pytest.mark.parametrize("options", [QUICK, ALL])
def test_latents_on_hopper_stay_in_registers(
    options: list[str], compiled: Callable[..., list[str]]
) -> None:
    """All that a tile needs; a segment's end may spill."""
    assert len(compiled("compile_latents", *options)) == (1 if options else 6)


@pytest.mark.parametrize("name", ["sm_86", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_every_op_compiles_below_hopper_and_above(
    name: str, compiled: Callable[..., list[str]]
) -> None:
    """Each op once for the two architectures of the least shared memory: it fits into theirs."""
    lines = compiled("architectures", "--quick", name)
    found = {line.split()[1] for line in lines if line.startswith(name)}
    assert found == {op.name for op in OPS}


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in ARCHITECTURES.values()])
def test_every_tile_compiles_and_fits(name: str, compiled: Callable[..., list[str]]) -> None:
    """All launches of an architecture, at the sizes of real models too."""
    assert {line.split()[1] for line in compiled("architectures", name)} == {op.name for op in OPS}


def test_packed_weights_reach_the_matrix_units_in_their_own_order(
    compiled: Callable[[str], list[str]],
) -> None:
    """On Hopper and Ampere: kWidth 2, and on Hopper no second way through shared memory."""
    assert len(compiled("compile_quantized")) == 11


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param(["--quick"], 8, id="quick"),
        pytest.param([], 40, id="all", marks=pytest.mark.slow),
    ],
)
def test_what_passes_through_a_ring_stays_in_registers(
    options: list[str], count: int, compiled: Callable[..., list[str]]
) -> None:
    """On Hopper, for 8, 64, 128 and 256 tokens, by programs for a tile each and by ones that share
    tiles; all of five layouts, or each number of tokens once."""
    assert len(compiled("compile_quantized", "--pipeline", *options)) == count


@pytest.mark.slow
def test_warps_that_work_alone_keep_all_in_registers(
    compiled: Callable[..., list[str]],
) -> None:
    """Every candidate of one layout and one of each other, on three architectures."""
    assert len(compiled("compile_quantized", "--gemv")) >= 23


@pytest.mark.parametrize(
    ("arch", "count", "options"),
    [
        pytest.param("86", 7, ["--quick"], id="sm_86-quick"),
        pytest.param("90", 8, ["--quick"], id="sm_90-quick"),
        pytest.param("86", 41, [], id="sm_86", marks=pytest.mark.slow),
        pytest.param("90", 61, [], id="sm_90", marks=pytest.mark.slow),
    ],
)
def test_packed_caches_enter_products_as_unpacked_ones(
    arch: str, count: int, options: list[str], compiled: Callable[..., list[str]]
) -> None:
    """On Hopper and on an architecture of mma.sync, in every format, or each format on one."""
    lines = compiled("compile_kv", *options, arch)
    assert len(lines) == count and {line.split()[0] for line in lines} == {arch}
