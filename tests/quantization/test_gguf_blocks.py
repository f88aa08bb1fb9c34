"""Values of GGUF blocks against the gguf package, the reference in Python of ggml's authors."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.quantization.gguf_blocks import LAYOUTS, PLAIN, bytes_per_row, dequantize

KINDS = (*PLAIN, *LAYOUTS)
SCALES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where fp16 scales and minima begin in a block; elsewhere at 0."""


def expected(kind: str, blocks: Tensor) -> Tensor:
    """Return the values of the gguf package."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


def random_blocks(kind: str, rows: int, columns: int) -> Tensor:
    """Return random bytes: scales are of every size, infinite and NaN ones among them."""
    generator = torch.Generator().manual_seed(LAYOUTS[kind].number if kind in LAYOUTS else 99)
    size = bytes_per_row(kind, columns)
    return torch.randint(0, 256, (rows, size), dtype=torch.uint8, generator=generator)


def sound_blocks(kind: str, rows: int, columns: int) -> Tensor:
    """Return random blocks whose scales are those of weights below 1."""
    layout = LAYOUTS[kind]
    blocks = random_blocks(kind, rows, columns).view(-1, layout.nbytes)
    generator = torch.Generator().manual_seed(rows)
    if kind == "MXFP4":
        blocks[:, 0] = torch.randint(115, 122, (len(blocks),), generator=generator)
    else:
        for at in SCALES.get(kind, (0,)):
            scale = torch.rand(len(blocks), 1, generator=generator) * 2**-10
            blocks[:, at : at + 2] = scale.half().view(torch.uint8)
    return blocks.view(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_package(kind: str) -> None:
    blocks = random_blocks(kind, rows=67, columns=1536)
    found = dequantize(kind, blocks)
    want = expected(kind, blocks)
    assert found.dtype == torch.float32 and found.shape == (67, 1536)
    number = want == want
    assert torch.equal(found.view(torch.int32)[number], want.view(torch.int32)[number])
    assert torch.equal(found == found, number)


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "MXFP4"])
def test_scales_that_are_infinite_or_nan(kind: str) -> None:
    layout = LAYOUTS[kind]
    blocks = random_blocks(kind, rows=8, columns=layout.columns)
    (at, *_) = SCALES.get(kind, (0,))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 2**-24, 65504, 1, 0])
    blocks[:, at : at + 2] = special.half()[:, None].view(torch.uint8)
    torch.testing.assert_close(
        dequantize(kind, blocks), expected(kind, blocks), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_block_sizes_and_numbers_are_those_of_the_gguf_package(kind: str) -> None:
    known = GGMLQuantizationType[kind]
    if kind in PLAIN:
        number, dtype = PLAIN[kind]
        assert (1, dtype.itemsize) == GGML_QUANT_SIZES[known]
    else:
        layout = LAYOUTS[kind]
        number = layout.number
        assert (layout.columns, layout.nbytes) == GGML_QUANT_SIZES[known]
    assert number == known


def test_rows_may_be_strided() -> None:
    wide = random_blocks("Q4_K", rows=5, columns=1024)
    part = wide[::2, 144:432]
    found = dequantize("Q4_K", part)
    assert found.shape == (3, 512)
    torch.testing.assert_close(
        found, dequantize("Q4_K", part.contiguous()), rtol=0, atol=0, equal_nan=True
    )
    assert dequantize("Q4_K", wide[:0]).shape == (0, 1024)


def test_a_type_that_is_not_built_is_named() -> None:
    with pytest.raises(CheckpointError, match="IQ2_XXS.*Q4_K, Q5_K"):
        dequantize("IQ2_XXS", torch.zeros(1, 66, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="Q6_K has rows of 100 columns.*256"):
        bytes_per_row("Q6_K", 100)
