"""Tests of experts: a row has the same bits in both forms and in any batch."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from lockstep.kernels.activations import silu_mul
from lockstep.kernels.architecture import ARCHITECTURES, HOPPER, shared_memory_limit
from lockstep.kernels.compile_target import CompileTarget, compile_target, uses_mma_sync
from lockstep.kernels.experts import experts
from lockstep.kernels.experts.tiles import (
    FP32_TILES,
    LARGE_TILES,
    SORTED_TILES,
    UNSORTED_TILES,
    Tile,
    Tiles,
    fit_dense_tile,
    fit_quantized_tile,
    runs_unsorted,
    same_tiles,
    tiles_of,
)
from lockstep.kernels.formats.weights import Fp4Weight, Fp8Weight, IntWeight
from lockstep.kernels.formats.weights.cases import layouts, random_weights
from lockstep.kernels.formats.weights.operand import shared_memory_bytes
from lockstep.kernels.linear import linear, tree_sum
from lockstep.kernels.route import route
from tests.kernels.backends import Backend, backends, same_bits

BACKENDS = backends(op=experts)
TRITON = [param for param in BACKENDS if param.values[0].name == "triton"]
SMALL = dict(tokens=9, hidden=40, inner=24, count=16, slots=4)
REAL = dict(tokens=300, hidden=2048, inner=512, count=60, slots=8)
EVERY = [UNSORTED_TILES, LARGE_TILES, *(tiles for _, tiles in SORTED_TILES)]
EVERY_M = (1, 2, 7, 16, 64, 200)
MANY_TOKENS = 2048
"""Tokens of a long prompt, on a GPU."""
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def random_arguments(
    backend: Backend, tokens: int, hidden: int, inner: int, count: int, slots: int
) -> dict[str, torch.Tensor]:
    """Return arguments in the backend's dtype on its device.

    For the interpreter, whose dot has no fixed order, they are small integers, on which all sums
    are exact.
    """
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if backend.interpreted:
            return torch.randint(-2, 3, shape, generator=generator) / 4
        return torch.randn(shape, generator=generator) * scale

    ids, weights, *_ = route(torch.randn(tokens, count, generator=generator), slots)
    arguments = dict(
        x=numbers(tokens, hidden),
        up=numbers(count, 2 * inner, hidden, scale=hidden**-0.5),
        down=numbers(count, hidden, inner, scale=inner**-0.5),
        weights=weights,
        shared=numbers(tokens, hidden),
        shared_gate=numbers(tokens),
    )
    result = {name: x.to(backend.dtype) for name, x in arguments.items()}
    return backend.place(result | {"weights": weights, "ids": ids})


def rows(arguments: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """Return the same call with only these tokens."""
    same = ("up", "down")
    return {name: x if name in same else x[begin:end] for name, x in arguments.items()}


def test_reference_equals_sum_of_gated_mlps():
    backend = Backend("reference", "cpu", torch.float32)
    a = random_arguments(backend, **SMALL)
    wide = {name: x.double() for name, x in a.items() if name != "ids"}
    expected = torch.sigmoid(wide["shared_gate"])[:, None] * wide["shared"]
    for t, mine in enumerate(a["ids"].tolist()):
        for slot, e in enumerate(mine):
            gate, up = (wide["up"][e] @ wide["x"][t]).chunk(2)
            y = wide["down"][e] @ (torch.nn.functional.silu(gate) * up)
            expected[t] += wide["weights"][t, slot] * y
    torch.testing.assert_close(experts(**a), expected.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_bits_are_batch_independent(backend):
    """Alone, among few tokens and among many, which use different forms."""
    a = random_arguments(backend, **(REAL if backend.on_gpu else SMALL))
    full = backend.run(experts, a)
    sizes = [runs_unsorted(tokens, 4, 16) for tokens in (1, 2, 6, 9)]
    assert sizes == [True, True, False, False]
    for begin, end in ((0, 1), (3, 5), (2, 8), (4, 4)):
        assert same_bits(backend.run(experts, rows(a, begin, end)), full[begin:end]), (begin, end)
    if backend.on_gpu:
        for end in (16, 17, 40, 129, 299):
            assert same_bits(backend.run(experts, rows(a, 0, end)), full[:end]), end


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row(backend):
    """A padded row may hold anything, invalid ids too, without effect on other rows."""
    a = random_arguments(backend, **SMALL | dict(tokens=7))
    full = backend.run(experts, a)
    broken = {name: x.clone() for name, x in a.items()}
    for name in ("x", "weights", "shared", "shared_gate"):
        broken[name][3] = torch.nan
    broken["ids"][3] = torch.tensor([-5, 2**31 - 1, -(2**31), 6], dtype=torch.int32)
    actual = backend.run(experts, broken)
    kept = [0, 1, 2, 4, 5, 6]
    assert same_bits(actual[kept], full[kept]) and actual[3].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_expert_accepts_partials(backend):
    """In both forms: their sum is rounded before it is gated."""
    for tokens in (1, 9):
        a = random_arguments(backend, **SMALL | dict(tokens=tokens))
        parts = torch.randn(4, tokens, SMALL["hidden"], generator=torch.Generator().manual_seed(5))
        full = a | dict(shared=tree_sum(parts).to(backend.dtype))
        actual = backend.run(experts, a | dict(shared=parts))
        assert same_bits(actual, backend.run(experts, full))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_tokens_routed_to_one_expert(backend):
    """Use more pairs than a tile has; ids also repeat within a row."""
    tokens = 20 if backend.interpreted else 140
    a = random_arguments(backend, **SMALL | dict(tokens=tokens, hidden=17, inner=8, slots=2))
    a["ids"].fill_(4)
    full = backend.run(experts, a)
    oracle = {name: x.cpu().float() if x.is_floating_point() else x.cpu() for name, x in a.items()}
    tolerance = 1e-5 if backend.dtype == torch.float32 else 5e-2
    expected = experts.backends["cpu"].run(**oracle)
    torch.testing.assert_close(full.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    assert same_bits(backend.run(experts, rows(a, 2, 3)), full[2:3])


HALF = Backend("triton", "cpu", torch.float16)
FORMS = [
    *TRITON,
    *(pytest.param(HALF, id=str(HALF)) for p in TRITON if p.values[0].interpreted),
]


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("one", [False, True])
def test_form_and_tile_change_no_bit(backend, one):
    """one: all pairs are routed to one expert, more than a tile of the form for few tokens
    has."""
    from lockstep.kernels.experts.triton import launch_sorted, launch_unsorted

    sizes = SMALL | dict(tokens=5, count=6) if backend.interpreted else REAL | dict(tokens=16)
    a = random_arguments(backend, **sizes)
    order = ("x", "up", "down", "ids", "weights", "shared", "shared_gate")
    if one:
        a["ids"].fill_(3)
    arguments = [a[name] for name in order]
    every = EVERY
    if backend.dtype == torch.float32:
        every = [FP32_TILES]
    elif backend.interpreted:
        every = [same_tiles(Tile(64, 16, 32, 4, 5)), same_tiles(Tile(128, 128, 32, 8, 3))]
    full = launch_unsorted(*arguments, every[0])
    for tiles in every:
        assert same_bits(launch_sorted(*arguments, tiles), full), tiles


SORTS = (
    (1, (1, 31, 4096, 4097)),
    (2, (1, 257, 1025)),
    (5, (64, 200)),
    (30, (65, 530)),
    (255, (129, 2048)),
    (256, (256, 512)),
    pytest.param(256, (70_000,), marks=pytest.mark.slow),  # 13 s under the interpreter
    (512, (511, 4096, 8_193)),
)
"""(experts, pairs): near the pairs that one CTA or chunk counts, where several launches begin, and
more than are summed at once."""


@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize("count, sizes", SORTS)
def test_sort_is_stable_and_tiles_cover_each_pair_once(backend, count, sizes):
    """Includes ids out of range. Empty tiles come last."""
    from lockstep.kernels.experts.dispatch import sort_pairs

    generator = torch.Generator().manual_seed(1)
    for pairs, tokens in product(sizes, (16, 128)):
        ids = torch.randint(-2, count + 2, (pairs, 1), generator=generator, dtype=torch.int32)
        ids[::37] = 2**31 - 1
        ids[5::41] = -(2**31)
        order, table = sort_pairs(ids.to(backend.device), count, tokens)
        mine = ids.flatten().clamp(0, count - 1).long()
        assert tiles_in(order, table) == expected_tiles(mine, count, tokens), pairs


@pytest.mark.parametrize("backend", TRITON)
def test_sort_handles_any_distribution(backend):
    """Sort with all pairs at one expert, and with the maximum number of tiles."""
    from lockstep.kernels.experts.dispatch import sort_pairs

    count = 9
    tokens = 16
    full = torch.full((100,), 4, dtype=torch.int32)
    whole_tiles = torch.tensor([0] * (16 * 5 + 1) + list(range(1, count)), dtype=torch.int32)
    for ids in (full, whole_tiles):
        order, table = sort_pairs(ids[:, None].to(backend.device), count, tokens)
        assert tiles_in(order, table) == expected_tiles(ids.long(), count, tokens)
    assert len(table) == len(tiles_in(order, table)) == count + 5


def tiles_in(order: torch.Tensor, table: torch.Tensor) -> list[tuple[int, list[int]]]:
    """Return the expert and pairs of the non-empty tiles, which come first."""
    used = [entry for entry in table.tolist() if entry[0] >= 0]
    assert all(entry[0] == -1 for entry in table[len(used) :].tolist())
    retained = zip(used, order.tolist(), strict=False)
    return [(expert, pairs[:count]) for (expert, count), pairs in retained]


def expected_tiles(mine: torch.Tensor, count: int, tokens: int) -> list[tuple[int, list[int]]]:
    """Return the expert and pairs of each tile that pairs of these experts fill, in the order of
    pairs."""
    tiles = []
    for expert in range(count):
        pairs = (mine == expert).nonzero()[:, 0].tolist()
        tiles += [(expert, pairs[at : at + tokens]) for at in range(0, len(pairs), tokens)]
    return tiles


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_expert_equals_gated_mlp_of_linear(backend):
    """Bit for bit: the reduction equals that of linear with one split. Within a tolerance under the
    interpreter, which multiplies in numpy's order."""
    for tokens in (1, 6):
        a = random_arguments(backend, **SMALL | dict(tokens=tokens, slots=1))
        a["ids"].fill_(5)
        a["weights"].fill_(1.0)
        actual = backend.run(experts, a | dict(shared=None, shared_gate=None))
        gate_up = backend.run(linear, dict(x=a["x"], weight=a["up"][5]))
        act = backend.run(silu_mul, dict(gate_up=gate_up))
        expected = backend.run(linear, dict(x=act, weight=a["down"][5]))
        torch.testing.assert_close(actual, expected)
        assert backend.interpreted or same_bits(actual, expected)


def test_tile_size_grows_with_tokens():
    for tokens, block in ((1, 16), (64, 16), (256, 16), (512, 32), (1024, 64), (8192, 128)):
        actual = tiles_of(8 * tokens, 256, torch.bfloat16, runs_unsorted(tokens, 8, 256))
        assert {tile.tokens for tile in actual} == {block}
    assert {tiles_of(8 * t, 256, torch.float32, t == 1) for t in (1, 64, 8192)} == {FP32_TILES}


def test_quantized_experts_are_sorted_at_fewer_tokens():
    """Nano's 6 experts per token use 8 padded slots, of 128 experts; 35B-A3B uses 8 of 256."""
    assert [runs_unsorted(tokens, 6, 128, quantized=True) for tokens in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    assert [runs_unsorted(tokens, 8, 256, quantized=True) for tokens in (1, 4, 5)] == [
        True,
        True,
        False,
    ]
    assert runs_unsorted(10, 6, 128) and runs_unsorted(16, 8, 256)
    assert runs_unsorted(1, 8, 16, quantized=True)


def quantized_arguments(
    backend: Backend, sizes: dict[str, int], up: str, down: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the arguments with quantized weights of these layouts, and with their dequantized
    weights."""
    a = random_arguments(backend, **sizes)
    count, hidden, inner = a["down"].shape
    result = dict(
        up=dict(random_weights(count * 2 * inner, hidden))[up],
        down=dict(random_weights(count * hidden, inner))[down],
    )
    plain = {name: w.dequantize(backend.dtype).view_as(a[name]) for name, w in result.items()}
    return backend.place(a | result), backend.place(a | plain)


LAYOUTS = [name for name, _ in layouts(8, 128)]


@pytest.mark.default_cases("int4", "int4 desc_act", "fp8 by blocks", "nvfp4", "Q4_K", "MXFP4")
@pytest.mark.parametrize("name", LAYOUTS)
def test_quantized_experts_equal_dequantized(name):
    """By definition, for rows of one expert at a time; down is quantized in another layout."""
    down = LAYOUTS[LAYOUTS.index(name) - 1]
    for chosen, every in (("reference", (2,)), ("cpu", EVERY_M)):
        run = experts.backends[chosen].run
        for tokens in every:
            sizes = SMALL | dict(tokens=tokens, count=3, slots=2)
            backend = Backend(chosen, "cpu", torch.bfloat16)
            packed, plain = quantized_arguments(backend, sizes, name, down)
            assert same_bits(run(**packed), run(**plain)), (chosen, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_quantized_experts_for_each_token_count(name, dtype):
    """Every layout, with the op's choice of form and tiles; widths that fill neither block nor
    group."""
    run = experts.backends["triton"].run
    for tokens in (*EVERY_M, MANY_TOKENS):
        sizes = dict(tokens=tokens, hidden=200, inner=72, count=12, slots=3)
        packed, plain = quantized_arguments(Backend("triton", "cuda", dtype), sizes, name, name)
        assert same_bits(run(**packed), run(**plain)), tokens


def quantized_params() -> list[Any]:
    """Return params (name, backend).

    Under the interpreter fp32 differs from fp16 only by the tile, so all but two layouts are marked
    slow there.
    """
    often = ("int4 by 32", "int4 desc_act")
    results = []
    for name in (*often, "fp8 by blocks", "nvfp4"):
        for param in FORMS:
            (backend,) = param.values
            repeated = backend.interpreted and backend is not HALF and name not in often
            marks = [*param.marks, *([pytest.mark.slow] if repeated else [])]
            results.append(pytest.param(name, backend, id=f"{name}-{param.id}", marks=marks))
    return results


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("name", "backend"), quantized_params())
def test_quantized_experts_in_both_forms(backend, name):
    """Dequantized in registers, or before the products: the bits of the dequantized weights.

    The interpreter multiplies in numpy's order, so there both forms use the same tile.
    """
    from lockstep.kernels.experts.triton import launch_sorted, launch_unsorted

    if backend.interpreted:
        sizes = dict(tokens=3, hidden=136, inner=72, count=3, slots=2)
    else:
        sizes = REAL | dict(tokens=16)
    packed, plain = quantized_arguments(backend, sizes, name, name)
    order = ("x", "up", "down", "ids", "weights", "shared", "shared_gate")
    every = [UNSORTED_TILES, LARGE_TILES] if backend.interpreted else EVERY
    for tiles in [FP32_TILES] if backend.dtype == torch.float32 else every:
        for launch in (launch_unsorted, launch_sorted):
            if launch is launch_unsorted and tiles.up.tokens > UNSORTED_TILES.up.tokens:
                continue
            same = tiles
            if backend.interpreted and backend.dtype != torch.float32 and "desc_act" not in name:
                wide = zip((tiles.quantized_up, tiles.quantized_down), ("up", "down"), strict=True)
                fitted = [fit_quantized_tile(tile, packed[part], HOPPER) for tile, part in wide]
                same = Tiles(*fitted, *fitted)
            want = launch(*(plain[part] for part in order), same)
            have = launch(*(packed[part] for part in order), tiles)
            assert same_bits(have, want), (tiles, launch.__name__)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "slots", "act"),
    [(1, 8, "silu_mul"), (8, 6, "relu2"), (9, 10, "silu_mul"), (16, 4, "relu2")],
)
def test_pipelined_experts_equal_dequantized(tokens, slots, act):
    """With columns that fill no block, partials of the shared expert, and ids of null rows."""
    from lockstep.kernels.experts import pipeline
    from lockstep.kernels.experts.triton import launch_unsorted

    device = torch.device("cuda")
    count = 20
    hidden = 1032
    inner = 344
    rows = 2 * inner if act == "silu_mul" else inner
    up = Fp8Weight.empty(count * rows, hidden, 1, hidden, device=device)
    down = Fp8Weight.empty(count * hidden, inner, 1, inner, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for weight in (up, down):
        weight.fill_dummy(generator)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
    ids = torch.rand(tokens, count, device=device).topk(slots, 1).indices.int()
    ids[-1, :2] = torch.tensor([-7, 10**6])
    shares = torch.rand(tokens, slots, device=device)
    shared = torch.randn(2, tokens, hidden, device=device)
    arguments = (ids, shares, shared, None, UNSORTED_TILES, act == "silu_mul")
    plain = (
        up.dequantize(x.dtype).view(count, rows, hidden),
        down.dequantize(x.dtype).view(count, hidden, inner),
    )
    assert pipeline.up_tile(up, tokens, compile_target(device)) is not None
    assert (pipeline.down_tile(down, slots, compile_target(device)) is None) == (
        slots < pipeline.MIN_SLOTS
    )
    want = launch_unsorted(x, *plain, *arguments)
    for _ in range(5):
        assert same_bits(launch_unsorted(x, up, down, *arguments), want)


def test_pipeline_tiles_by_architecture_and_tokens():
    from lockstep.kernels.experts import pipeline

    weight = Fp8Weight.empty(128, 1856, 1, 1856, device="meta")
    hopper = CompileTarget(HOPPER, inline_ptx=True)
    assert pipeline.up_tile(weight, 8, hopper) == Tile(64, 8, 128, 4, 4)
    assert pipeline.up_tile(weight, 9, hopper) == Tile(64, 16, 128, 4, 3)
    assert pipeline.down_tile(weight, 10, hopper) == Tile(128, 16, 128, 4, 2)
    rest = [replace(hopper, arch=arch) for arch in ARCHITECTURES if arch != HOPPER]
    interpreter = replace(hopper, inline_ptx=False)
    assert not any(pipeline.up_tile(weight, 1, target) for target in (*rest, interpreter))
    small = IntWeight.empty(128, 1856, group=32, device="meta")
    plain = torch.empty(128, 1856, device="meta")
    assert not any(pipeline.up_tile(other, 1, hopper) for other in (small, plain))
    assert pipeline.up_tile(weight, 17, hopper) is None
    assert pipeline.down_tile(weight, 4, hopper) is None
    assert pipeline.down_tile(weight, 17, hopper) is None


def test_bulk_copies_are_limited_to_hopper():
    """Other architectures use a tile of at most 128 rows instead of 256."""
    assert fit_dense_tile(LARGE_TILES.down, torch.bfloat16, HOPPER) == LARGE_TILES.down
    for arch in ARCHITECTURES:
        if arch != HOPPER:
            actual = fit_dense_tile(LARGE_TILES.down, torch.bfloat16, arch)
            assert (actual.rows, actual.tma) == (128, False)


def test_quantized_tiles_hold_whole_column_blocks():
    """Blocks of 128 columns hold whole groups or a part of one."""
    for tile in {tile for tiles in EVERY for tile in tiles[2:]}:
        for k, group, columns in ((2048, 128, tile.k), (200, 128, 128), (1536, 384, 128)):
            weight = IntWeight.empty(8, k, group=group, device="meta")
            assert fit_quantized_tile(tile, weight, HOPPER) == replace(tile, k=columns)


def test_nvfp4_tiles_are_narrow_on_sm_100():
    """Products read them from shared memory there, and Triton lays out no 128 rows
    (tests/kernels/architectures.py compiles them)."""
    weight = Fp4Weight.empty(256, 2048, device="meta")
    actual = {
        arch: fit_quantized_tile(LARGE_TILES.quantized_up, weight, arch).rows
        for arch in ARCHITECTURES
    }
    assert actual.pop(100) == 64
    assert set(actual.values()) == {LARGE_TILES.quantized_up.rows}
    other = Fp8Weight.empty(256, 2048, 128, 128, device="meta")
    assert (
        fit_quantized_tile(LARGE_TILES.quantized_up, other, 100).rows
        == LARGE_TILES.quantized_up.rows
    )


def test_tiles_fit_shared_memory_of_each_architecture():
    """With fewer stages where all do not fit."""
    weight = Fp8Weight.empty(256, 2048, 128, 128, device="meta")
    for arch, tiles in product(ARCHITECTURES, EVERY):
        for tile in tiles[:2]:
            actual = fit_dense_tile(tile, torch.bfloat16, arch)
            loaded = 2 * (actual.rows + actual.tokens) * actual.k
            assert (actual.stages - 1) * loaded <= shared_memory_limit(arch)
        for tile in tiles[2:]:
            actual = fit_quantized_tile(tile, weight, arch)
            sync = uses_mma_sync(arch)
            stage, fixed = shared_memory_bytes(actual.rows, actual.tokens, actual.k, weight, sync)
            assert (actual.stages - 1) * stage + fixed <= shared_memory_limit(arch)
    assert (
        fit_quantized_tile(LARGE_TILES.quantized_up, weight, 86).stages
        < LARGE_TILES.quantized_up.stages
    )
