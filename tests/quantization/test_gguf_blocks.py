"""Values of GGUF blocks equal those of the gguf package, the Python reference of ggml's authors."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.quantization.gguf_blocks import LAYOUTS, PLAIN, bytes_per_row, dequantize

KINDS = (*PLAIN, *LAYOUTS)
SCALE_OFFSETS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Byte offsets of fp16 scales and minima in a block; 0 for other types."""


def expected(kind: str, blocks: Tensor) -> Tensor:
    """Return the values of the gguf package."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


def random_blocks(kind: str, rows: int, columns: int) -> Tensor:
    """Return random bytes: scales of any magnitude, infinities and NaN included."""
    generator = torch.Generator().manual_seed(LAYOUTS[kind].number if kind in LAYOUTS else 99)
    size = bytes_per_row(kind, columns)
    return torch.randint(0, 256, (rows, size), dtype=torch.uint8, generator=generator)


def valid_blocks(kind: str, rows: int, columns: int) -> Tensor:
    """Return random blocks with the scales of weights below 1."""
    layout = LAYOUTS[kind]
    blocks = random_blocks(kind, rows, columns).view(-1, layout.nbytes)
    generator = torch.Generator().manual_seed(rows)
    if kind == "MXFP4":
        blocks[:, 0] = torch.randint(115, 122, (len(blocks),), generator=generator)
    else:
        for at in SCALE_OFFSETS.get(kind, (0,)):
            scale = torch.rand(len(blocks), 1, generator=generator) * 2**-10
            blocks[:, at : at + 2] = scale.half().view(torch.uint8)
    return blocks.view(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_values_equal_gguf_package(kind: str) -> None:
    blocks = random_blocks(kind, rows=67, columns=1536)
    actual = dequantize(kind, blocks)
    want = expected(kind, blocks)
    assert actual.dtype == torch.float32 and actual.shape == (67, 1536)
    number = want == want
    assert torch.equal(actual.view(torch.int32)[number], want.view(torch.int32)[number])
    assert torch.equal(actual == actual, number)


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "MXFP4"])
def test_gguf_infinite_and_nan_scales(kind: str) -> None:
    layout = LAYOUTS[kind]
    blocks = random_blocks(kind, rows=8, columns=layout.columns)
    (at, *_) = SCALE_OFFSETS.get(kind, (0,))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 2**-24, 65504, 1, 0])
    blocks[:, at : at + 2] = special.half()[:, None].view(torch.uint8)
    torch.testing.assert_close(
        dequantize(kind, blocks), expected(kind, blocks), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_block_sizes_and_type_numbers(kind: str) -> None:
    known = GGMLQuantizationType[kind]
    if kind in PLAIN:
        number, dtype = PLAIN[kind]
        assert (1, dtype.itemsize) == GGML_QUANT_SIZES[known]
    else:
        layout = LAYOUTS[kind]
        number = layout.number
        assert (layout.columns, layout.nbytes) == GGML_QUANT_SIZES[known]
    assert number == known


def test_gguf_blocks_in_strided_rows() -> None:
    wide = random_blocks("Q4_K", rows=5, columns=1024)
    part = wide[::2, 144:432]
    actual = dequantize("Q4_K", part)
    assert actual.shape == (3, 512)
    torch.testing.assert_close(
        actual, dequantize("Q4_K", part.contiguous()), rtol=0, atol=0, equal_nan=True
    )
    assert dequantize("Q4_K", wide[:0]).shape == (0, 1024)


def test_unsupported_gguf_type_is_named() -> None:
    with pytest.raises(CheckpointError, match="IQ2_XXS.*Q4_K, Q5_K"):
        dequantize("IQ2_XXS", torch.zeros(1, 66, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="Q6_K has rows of 100 columns.*256"):
        bytes_per_row("Q6_K", 100)
