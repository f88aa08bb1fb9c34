"""A kernel that reads a tile of a packed cache by assembly and writes it as it is."""

import torch
import triton
import triton.language as tl

TILE = 16


@triton.jit
def _read(
    codes, numbers, out, live, WORDS: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, SHARE: tl.constexpr, FETCH: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """live: tokens that are not masked. Known at run time alone, as in every kernel: ptxas 12.8
    folds the conversion of a constant word of e4m3 to a wrong number."""
    token = tl.arange(0, TILE)[:, None]
    d = tl.arange(0, D)[None]
    columns = tl.arange(0, max(D // SHARE, 1))[None]
    found = FETCH(codes + token * WORDS, numbers + token * COUNT, columns, token < live, D)
    tile = UNPACK(found, columns, None, D)
    tl.store(out + token * D + d, tile.to(out.dtype.element_ty))


def tiles(codec, dim, backend, unpack):
    """What the kernel reads of TILE random tokens, whose last is masked, by the function `unpack`
    of the codec's KVDevice, and what the reference decodes to bf16, both [TILE, D] fp32. Codes are
    random, numbers those of tokens of all sizes, one is NaN."""
    generator = torch.Generator().manual_seed(dim)
    words = codec.width(dim)
    codes = torch.randint(-(2**31), 2**31, (TILE, words), generator=generator).to(codec.dtype)
    x = torch.randn(TILE, dim, generator=generator)
    x *= torch.exp2(torch.randint(-90, 90, (TILE, 1), generator=generator).float())
    x[0] = 0.0
    x[1, -1] = torch.nan
    numbers = codec.encode(x)[-1]
    wanted = codec.decode(codes, numbers).bfloat16().float()
    wanted[-1] = 0.0
    out = torch.empty(TILE, dim, dtype=backend.dtype, device=backend.device)
    given = [x.to(backend.device) for x in (codes, numbers)]
    own = codec.device()
    how = (own.share, own.fetch, getattr(own, unpack))
    _read[(1,)](*given, out, TILE - 1, words, codec.count(dim), dim, TILE, *how, num_warps=1)
    return out.cpu().float(), wanted
