"""A kernel that loads a tile of a quantized cache by assembly and stores it unchanged."""

import torch
import triton
import triton.language as tl

TILE = 16


@triton.jit
def _read(
    qdata, scales, out, live, WORDS: tl.constexpr, NUM_SCALES: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, PER_LOAD: tl.constexpr, LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile and store it.

    live: tokens that are not masked. It is known at run time only, as in every kernel: ptxas 12.8
    folds the conversion of a constant word of e4m3 to a wrong number.
    """
    token = tl.arange(0, TILE)[:, None]
    d = tl.arange(0, D)[None]
    columns = tl.arange(0, max(D // PER_LOAD, 1))[None]
    loaded = LOAD(qdata + token * WORDS, scales + token * NUM_SCALES, columns, token < live, D)
    tile = DEQUANTIZE(loaded, columns, None, D)
    tl.store(out + token * D + d, tile.to(out.dtype.element_ty))


def tiles(quantizer, dim, backend, dequantize):
    """Return what the kernel reads of TILE random tokens, the last one masked, and the reference in
    bf16.

    Both are [TILE, D] fp32. dequantize: name of the function in KVDeviceFunctions. Quantized values
    are random, scales those of tokens of all magnitudes, one of them NaN.
    """
    generator = torch.Generator().manual_seed(dim)
    words = quantizer.row_width(dim)
    qdata = torch.randint(-(2**31), 2**31, (TILE, words), generator=generator).to(quantizer.dtype)
    x = torch.randn(TILE, dim, generator=generator)
    x *= torch.exp2(torch.randint(-90, 90, (TILE, 1), generator=generator).float())
    x[0] = 0.0
    x[1, -1] = torch.nan
    scales = quantizer.quantize(x)[-1]
    expected = quantizer.dequantize(qdata, scales).bfloat16().float()
    expected[-1] = 0.0
    out = torch.empty(TILE, dim, dtype=backend.dtype, device=backend.device)
    inputs = [x.to(backend.device) for x in (qdata, scales)]
    device = quantizer.device_functions()
    functions = (device.values_per_load, device.load, getattr(device, dequantize))
    _read[(1,)](
        *inputs, out, TILE - 1, words, quantizer.num_scales(dim), dim, TILE, *functions, num_warps=1
    )
    return out.cpu().float(), expected
