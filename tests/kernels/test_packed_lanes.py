"""linear with packed weights for few tokens, by warps that work alone: which lane holds what."""

from typing import Any

import pytest
import torch
import triton.language as tl

from lockstep.kernels.linear.packed_tuning import PackedTile, block_tile, cut, lanes_serve
from lockstep.kernels.packed import Fp4Weight, IntWeight
from lockstep.kernels.packed._form import Target
from lockstep.kernels.packed.cases import random_weights
from tests.kernels import ptx
from tests.kernels.backends import same_bits
from tests.kernels.test_linear import graded
from tests.kernels.test_packed import whole_numbers

NAMES = [
    name for name, _ in random_weights(8, 128) if name not in ("int4 desc_act", "int4 by 48")
]
"""Layouts whose scales lie regularly."""


def lanes(m: int, high: int, warps: int, ahead: int, segments: int = 1) -> PackedTile:
    """A tile of `high` products of 16 outputs per warp."""
    return PackedTile(m, 16 * high * warps, 128, warps, ahead, segments, lanes=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("assembly", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_lane_holds_its_part(
    name: str, assembly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself, its assembly run on the CPU: sums are the plain product's, in parts of K."""
    from lockstep.kernels.linear.packed import _lanes

    monkeypatch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)
    place = NAMES.index(name)
    tokens = (1, 7, 16)[place % 3]
    tile = (lanes(8, 1, 1, 2), lanes(8, 1, 2, 1), lanes(16, 2, 1, 2))[place % 3]
    for dtype in (torch.float16, torch.bfloat16):
        weight = whole_numbers(name, 40, 512)
        x = graded(tokens, 512, 2, 3).to(dtype)
        found = torch.full((2, tokens, 40), -1.0)
        _lanes(x, weight, found, 256, tile, Target(90, assembly))
        halves = zip(x.float().split(256, 1), weight.unpack(dtype).float().split(256, 1))
        want = torch.stack([part @ other.T for part, other in halves])
        assert torch.equal(found, want), dtype
