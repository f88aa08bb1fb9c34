"""Launcher of the recurrent form in Triton, and layouts of a state."""

import torch
import triton
from torch import Tensor

from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.recurrent.step_kernel import walk_kernel

WIDEST = 128
"""Key and value dims up to which a program's share of a state fits its registers."""
MOST_REGISTERS = 128
"""32-bit registers of a thread: two programs of 8 warps share a multiprocessor, with 128 KB of
state in flight."""
ALIGNED = 16
"""Bytes of the widest load, and numbers between tokens that it needs."""
PARTS = 4
"""Programs that share a head's columns. H200, 48 heads of 128 x 128, 64 rows of 1 and 4 tokens:
86.4 and 142.2 us a layer, 89.7 and 142.5 with 2, 94.9 and 149.8 with 1."""
LINE = 128
"""Bytes of a line of memory. Parts of a head that share lines stand beside each other: Nano's heads
of 128 x 64, H200, 64 rows of a token, 147 -> 103 us where the state is written, 58 -> 56 where it
is not. Parts of whole lines stand apart: 64 rows of one token take 2 % longer otherwise."""
NEAR = 4
"""Tokens that are brought into L1 early; twice as many for windows longer than this. H200, 64 rows
of 1 and 4 tokens: 5 and 7 us less than into L2; of 8 tokens 205 us with 4 and 195 with 8."""
SECTOR = 8
"""Floats that a load of one of them brings into L1: 32 bytes."""


def sizes_of(state: RecurrentState) -> dict[str, int]:
    """HK, HV, K and V: constants of every kernel of a layer."""
    return dict(zip(("HK", "HV", "K", "V"), state.sizes(), strict=True))


def blocks_of(sizes: dict[str, int], most_v: int) -> dict[str, int]:
    """Powers of two from 16 on that hold K, and V or most_v values of it."""
    block_k = max(16, triton.next_power_of_2(sizes["K"]))
    block_v = max(16, triton.next_power_of_2(sizes["V"]))
    return dict(BLOCK_K=block_k, BLOCK_V=min(block_v, most_v))


def layout_of(sizes: dict[str, int]) -> dict[str, int]:
    """How a head's state lies in registers: SLICES x K_LANES rows, WARPS warps of COLUMNS columns.

    A thread holds 4 neighbours of COLUMNS, so COLUMNS / 4 x K_LANES threads make a warp. There are
    more threads than K and than V, or else the compiler takes vectors over shared memory. 1 to 8
    warps.
    """
    blocks = blocks_of(sizes, WIDEST)
    k = blocks["BLOCK_K"]
    v = blocks["BLOCK_V"]
    warps = min(max(k, v) // 16, v // 4)
    columns = v // warps
    lanes = max(1, min(k, 128 // columns))
    return dict(SLICES=k // lanes, K_LANES=lanes, WARPS=warps, COLUMNS=columns)


def beside_of(v: int, columns: int, itemsize: int) -> int:
    """How many programs of a head, of so many of its v columns, stand beside each other: see LINE.
    itemsize: of the state's numbers."""
    return triton.cdiv(v, columns) if columns * itemsize < LINE else 1


def flat(x: Tensor) -> Tensor:
    """[S, Q, ...] -> [S * Q, ...], tokens begun on whole vectors, so that one binary serves all."""
    tokens = x.flatten(0, 1)
    whole = tokens.stride(0) % ALIGNED == 0 and tokens.data_ptr() % ALIGNED == 0
    if whole and tokens[0].is_contiguous():
        return tokens
    return tokens.clone(memory_format=torch.contiguous_format)


def launch_walk(
    state: RecurrentState,
    heads: Tensor,
    o: Tensor,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int,
    skip: Tensor | None = None,
    corrects: bool = True,
) -> None:
    """Steps the windows of heads [S, Q, ...] into o [S, Q, HV, V] fp32: see walk_kernel."""
    rows, length, hv, v = o.shape
    sizes = sizes_of(state)
    layout = layout_of(sizes)
    warps = layout["WARPS"] // PARTS or 1
    layout["WARPS"] = warps
    columns = warps * layout["COLUMNS"]
    beside = beside_of(v, columns, state.recurrent.itemsize)
    walk_kernel[(rows * hv * beside, triton.cdiv(v, columns) // beside)](
        state.recurrent, state.u, state.k, state.decay, slots, starts, folded, heads, o, skip,
        length, state.k.shape[1], flush, **sizes, **layout,
        NEAR=NEAR if length <= NEAR else 2 * NEAR, SECTOR=SECTOR, STATE_GRID=state.grid,
        CORRECTS=corrects, BESIDE=beside, num_warps=warps, maxnreg=MOST_REGISTERS,
        enable_fp_fusion=False,
    )  # fmt: skip
