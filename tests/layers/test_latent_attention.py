"""The heads' absorbed maps, of latents that a cache keeps in a rotation."""

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


def absorbed(weight: Tensor, dtype: torch.dtype, turn: HadamardRotation | None) -> AbsorbedHeads:
    """The maps of a kv_b_proj, filled as a checkpoint fills them."""
    build = BuildContext("cpu", dtype, 1, 64)
    maps = AbsorbedHeads(build, HEADS, PLAIN, LATENT, VALUE, turn)
    (slot,) = maps.weights().values()
    slot.fill(weight.to(dtype))
    return maps


def off(found: Tensor, wanted: Tensor) -> float:
    """The relative error of a norm."""
    return float((found.double() - wanted).norm() / wanted.norm())


def test_rotated_maps_compare_and_expand_rotated_latents() -> None:
    """A score and a head's output are what they are without any rotation. In fp32 to its rounding;
    in bf16 as exactly as with queries that are rotated, and rounded once more, in every step."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(HEADS * (PLAIN + VALUE), LATENT, generator=draw) * LATENT**-0.5
    q = torch.randn(64, HEADS, PLAIN, generator=draw)
    latent = torch.randn(64, HEADS, LATENT, generator=draw)
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        own = weight.to(dtype)
        query = q.to(dtype)
        mixed = latent.to(dtype)
        heads = own.double().unflatten(0, (HEADS, -1))
        keys = heads[:, :PLAIN]
        values = heads[:, PLAIN:]
        scores = torch.einsum("thn,hnc,thc->th", query.double(), keys, mixed.double())
        outputs = torch.einsum("hvc,thc->thv", values, mixed.double())
        maps = absorbed(weight, dtype, TURN)
        turned = TURN.rotate(mixed)
        found = (maps.absorb(query).double() * turned.double()).sum(-1)
        assert off(found, scores) < most
        after = TURN.rotate(absorbed(weight, dtype, None).absorb(query)).to(dtype)
        again = (after.double() * turned.double()).sum(-1)
        assert dtype == torch.float32 or off(found, scores) < 1.1 * off(again, scores)
        assert off(maps.expand(turned.to(dtype)), outputs) < most
