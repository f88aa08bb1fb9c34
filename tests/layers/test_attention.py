"""Attention without rotary positions, with biases and another scale, equals torch's."""

import torch
import torch.nn.functional as F

from lockstep.layers.attention import Attention
from lockstep.layers.build_context import BuildContext
from lockstep.step import StepContext, StepShape

TOKENS = 9
HIDDEN = 24
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
PAGE = 16
SCALE = 0.7


def prompt_step() -> StepContext:
    """Return a step of one prompt of TOKENS tokens in page 1."""
    indices = torch.arange(TOKENS)
    unread = dict.fromkeys(StepContext.__dataclass_fields__)
    read = dict(
        shape=StepShape(1, TOKENS, TOKENS, prompt=True),
        positions=indices,
        slot_mapping=PAGE + indices,
        page_table=torch.tensor([[1]], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        starts=torch.tensor([0], dtype=torch.int32),
    )
    return StepContext(**{**unread, **read})  # type: ignore[arg-type]


def test_biases_and_scale_without_positions() -> None:
    torch.manual_seed(0)
    build = BuildContext("cpu", torch.float32, 1, 64)
    mixer = Attention(
        build,
        HIDDEN,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        rotary=None,
        bias=True,
        out_bias=True,
        scale=SCALE,
    )
    for parameter in mixer.parameters():
        parameter.data.normal_()
    mixer.bind(mixer.cache_spec().allocate(2, PAGE, "cpu"))
    x = torch.randn(TOKENS, HIDDEN)
    table = mixer.weights()
    assert set(table) == {f"{n}_proj.{part}" for n in "qkvo" for part in ("weight", "bias")}

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, table[f"{name}_proj.weight"], table[f"{name}_proj.bias"])

    q, k, v = (project(n, x).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1) for n in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    expected = project("o", mixed.transpose(0, 1).flatten(1))
    torch.testing.assert_close(mixer(x, prompt_step()), expected, rtol=1e-4, atol=1e-4)
