"""The absorbed projections of latent attention, for latents cached in a rotated basis."""

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import HadamardRotation
from lockstep.kernels.formats.kv.hadamard import K_BLOCK
from lockstep.layers.build_context import BuildContext
from lockstep.layers.latent_attention import AbsorbedHeads

HEADS = 4
PLAIN = 128
LATENT = 512
VALUE = 128
TURN = HadamardRotation(77, K_BLOCK)


def absorbed_projections(
    weight: Tensor, dtype: torch.dtype, turn: HadamardRotation | None
) -> AbsorbedHeads:
    """Return the absorbed projections of a kv_b_proj, filled as by a checkpoint."""
    build = BuildContext("cpu", dtype, 1, 64)
    maps = AbsorbedHeads(build, HEADS, PLAIN, LATENT, VALUE, turn)
    (slot,) = maps.weights().values()
    slot.fill(weight.to(dtype))
    return maps


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative error of a norm."""
    return float((result.double() - expected).norm() / expected.norm())


def test_rotated_projections_equal_unrotated_ones() -> None:
    """Scores and head outputs are equal: in fp32 up to rounding; in bf16 as exact as with queries
    rotated, and rounded once more, in every step."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(HEADS * (PLAIN + VALUE), LATENT, generator=draw) * LATENT**-0.5
    q = torch.randn(64, HEADS, PLAIN, generator=draw)
    latent = torch.randn(64, HEADS, LATENT, generator=draw)
    for dtype, maximum in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        mine = weight.to(dtype)
        query = q.to(dtype)
        mixed = latent.to(dtype)
        heads = mine.double().unflatten(0, (HEADS, -1))
        keys = heads[:, :PLAIN]
        values = heads[:, PLAIN:]
        scores = torch.einsum("thn,hnc,thc->th", query.double(), keys, mixed.double())
        outputs = torch.einsum("hvc,thc->thv", values, mixed.double())
        maps = absorbed_projections(weight, dtype, TURN)
        turned = TURN.rotate(mixed)
        actual = (maps.absorb(query).double() * turned.double()).sum(-1)
        assert relative_error(actual, scores) < maximum
        after = TURN.rotate(absorbed_projections(weight, dtype, None).absorb(query)).to(dtype)
        again = (after.double() * turned.double()).sum(-1)
        assert dtype == torch.float32 or relative_error(actual, scores) < 1.1 * relative_error(
            again, scores
        )
        assert relative_error(maps.expand(turned.to(dtype)), outputs) < maximum
