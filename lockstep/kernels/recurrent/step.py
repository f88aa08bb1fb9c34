"""Launcher of the recurrent form in Triton, and the register layout of a state."""

import torch
from torch import Tensor

from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.recurrent.step_kernel import recurrent_step_kernel, save_tokens_kernel

MAX_DIM = 128
"""Maximum key and value dim: up to it, a CTA's part of a state fits into registers."""
MAX_REGISTERS = 128
"""32-bit registers per thread. Two CTAs of 8 warps then share an SM, with 128 KB of state in
flight."""
LOAD_BYTES = 16
"""Bytes of the widest load, and the alignment that it needs."""
CTAS_PER_HEAD = 4
"""CTAs that split a head's columns. H200, 48 heads of 128 x 128, 64 rows of 1 and 4 tokens:
86.4 and 142.2 us a layer, 89.7 and 142.5 with 2, 94.9 and 149.8 with 1."""
CACHE_LINE = 128
"""Bytes of a cache line. CTAs of a head whose columns share lines get consecutive ids: Nano's heads
of 128 x 64, H200, 64 rows of a token, 147 -> 103 us where the state is written, 58 -> 56 where it
is not. CTAs with whole lines of their own do not: 64 rows of one token take 2 % longer then."""
PREFETCH = 4
"""Tokens that are prefetched into L1; twice as many for longer windows. H200, 64 rows of 1 and 4
tokens: 5 and 7 us less than into L2; of 8 tokens 205 us with 4 and 195 with 8."""
SECTOR = 8
"""Floats of a 32-byte sector, the unit that a load brings into L1."""


def head_sizes(state: RecurrentState) -> dict[str, int]:
    """Return HK, HV, K and V: constants of every kernel of a layer."""
    return dict(zip(("HK", "HV", "K", "V"), state.sizes(), strict=True))


def block_sizes(sizes: dict[str, int], max_v: int) -> dict[str, int]:
    """Return BLOCK_K >= K and BLOCK_V >= min(V, max_v): powers of two, 16 at least."""
    block_k = max(16, next_power_of_2(sizes["K"]))
    block_v = max(16, next_power_of_2(sizes["V"]))
    return dict(BLOCK_K=block_k, BLOCK_V=min(block_v, max_v))


def register_layout(sizes: dict[str, int]) -> dict[str, int]:
    """Return the layout of a head's state: SLICES x K_LANES rows, WARPS x COLUMNS columns."""
    blocks = block_sizes(sizes, MAX_DIM)
    k = blocks["BLOCK_K"]
    v = blocks["BLOCK_V"]
    # 1 to 8 warps. There must be more threads than K and than V: else the compiler passes vectors
    # of K or V through shared memory.
    warps = min(max(k, v) // 16, v // 4)
    columns = v // warps
    # A thread owns 4 adjacent columns, so COLUMNS / 4 * K_LANES threads are one warp.
    lanes = max(1, min(k, 128 // columns))
    return dict(SLICES=k // lanes, K_LANES=lanes, WARPS=warps, COLUMNS=columns)


def adjacent_ctas(v: int, columns: int, itemsize: int) -> int:
    """Return how many CTAs of a head get consecutive ids: see CACHE_LINE.

    v: columns of a head. columns: those of one CTA. itemsize: bytes per element of the state.
    """
    return ceil_div(v, columns) if columns * itemsize < CACHE_LINE else 1


def flatten_tokens(x: Tensor) -> Tensor:
    """Flatten [S, Q, ...] to [S * Q, ...], each token aligned to LOAD_BYTES.

    One binary then serves every batch, since Triton specialises kernels on alignment.
    """
    tokens = x.flatten(0, 1)
    aligned = tokens.stride(0) % LOAD_BYTES == 0 and tokens.data_ptr() % LOAD_BYTES == 0
    if aligned and tokens[0].is_contiguous():
        return tokens
    return tokens.clone(memory_format=torch.contiguous_format)


def launch_recurrent_step(
    state: RecurrentState,
    inputs: Tensor,
    out: Tensor,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int,
    committed: Tensor | None,
    d: Tensor | None = None,
    delta_rule: bool = True,
) -> None:
    """Step windows of inputs [S, Q, ...] into out [S, Q, HV, V] fp32: see recurrent_step_kernel.

    committed [S]: tokens of each window that are certain to stay; outputs of the others are not
    written. None: any token may be rejected.
    """
    rows, length, hv, v = out.shape
    sizes = head_sizes(state)
    layout = register_layout(sizes)
    warps = layout["WARPS"] // CTAS_PER_HEAD or 1
    layout["WARPS"] = warps
    columns = warps * layout["COLUMNS"]
    adjacent = adjacent_ctas(v, columns, state.recurrent.itemsize)
    recurrent_step_kernel[(rows * hv * adjacent, ceil_div(v, columns) // adjacent)](
        state.recurrent, state.u, state.k, state.decay, slots, starts, folded, inputs, out, d,
        committed, length, state.k.shape[1], flush, **sizes, **layout,
        PREFETCH=PREFETCH if length <= PREFETCH else 2 * PREFETCH, SECTOR=SECTOR,
        STATE_GRID=state.grid, DELTA_RULE=delta_rule, ADJACENT_CTAS=adjacent, num_warps=warps,
        maxnreg=MAX_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    if committed is not None and state.grid > 1:
        # The written state lacks the tokens after the last multiple of its grid. In fp32: none.
        save_tokens_kernel[(rows, min(length, state.grid - 1))](
            inputs, state.k, state.decay, slots, starts, folded, committed, length,
            state.k.shape[1], **sizes, BLOCK_K=next_power_of_2(sizes["HK"] * sizes["K"]),
            BLOCK_HV=next_power_of_2(hv), STATE_GRID=state.grid,
        )  # fmt: skip
