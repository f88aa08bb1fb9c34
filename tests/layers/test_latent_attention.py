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
ROTATION = HadamardRotation(77, K_BLOCK)


def absorbed_projections(
    weight: Tensor, dtype: torch.dtype, rotation: HadamardRotation | None
) -> AbsorbedHeads:
    """Return the absorbed projections of a kv_b_proj, filled as by a checkpoint."""
    build = BuildContext("cpu", dtype, 1, 64)
    projections = AbsorbedHeads(build, HEADS, PLAIN, LATENT, VALUE, rotation)
    (sink,) = projections.weights().values()
    sink.fill(weight.to(dtype))
    return projections


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative error of a norm."""
    return float((result.double() - expected).norm() / expected.norm())


def test_rotated_projections_equal_unrotated_ones() -> None:
    """Scores and head outputs are equal up to rounding.

    In bf16 the scores are as exact as those of queries that are rotated in every step, which rounds
    them once more.
    """
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(HEADS * (PLAIN + VALUE), LATENT, generator=generator) * LATENT**-0.5
    q = torch.randn(64, HEADS, PLAIN, generator=generator)
    latent = torch.randn(64, HEADS, LATENT, generator=generator)
    for dtype, maximum in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        rounded = weight.to(dtype)
        query = q.to(dtype)
        keys_values = latent.to(dtype)
        heads = rounded.double().unflatten(0, (HEADS, -1))
        keys = heads[:, :PLAIN]
        values = heads[:, PLAIN:]
        scores = torch.einsum("thn,hnc,thc->th", query.double(), keys, keys_values.double())
        outputs = torch.einsum("hvc,thc->thv", values, keys_values.double())
        projections = absorbed_projections(weight, dtype, ROTATION)
        rotated = ROTATION.rotate(keys_values)
        actual = (projections.absorb(query).double() * rotated.double()).sum(-1)
        assert relative_error(actual, scores) < maximum
        unrotated = absorbed_projections(weight, dtype, None)
        rotated_query = ROTATION.rotate(unrotated.absorb(query)).to(dtype)
        late_scores = (rotated_query.double() * rotated.double()).sum(-1)
        assert dtype == torch.float32 or relative_error(actual, scores) < 1.1 * relative_error(
            late_scores, scores
        )
        assert relative_error(projections.expand(rotated.to(dtype)), outputs) < maximum
