"""Grouped-query attention of most families, with optional head norms and rotary positions."""

from typing import Any

from torch import Tensor, nn

from training.models.functional import Fused, Norm, Positions, attend, linear, matrix, rms, rotate


def heads_of(
    h: Tensor, angles: tuple[Tensor, Tensor] | None, wq: Tensor, wk: Tensor, wv: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, d: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q [N, H, D], k, v [N, KV, D] of normed h [N, hidden].

    angles: cos and sin [N, R / 2].
    """
    q = linear(h, wq).unflatten(-1, (-1, d))
    k = linear(h, wk).unflatten(-1, (-1, d))
    v = linear(h, wv).unflatten(-1, (-1, d))
    if q_norm is not None and k_norm is not None:
        q = rms(q, q_norm)
        k = rms(k, k_norm)
    if angles is not None:
        q = rotate(q, *angles)
        k = rotate(k, *angles)
    return q, k, v


def heads_in(x: Tensor, norm: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads_of(norm(x), *rest) of x [N, hidden]."""
    return heads_of(rms(x, norm), *rest)


def heads_out(o: Tensor, x: Tensor, wo: Tensor) -> Tensor:
    """Return x plus the projection of o [N, H, D]."""
    return x + linear(o.flatten(1), wo)


class Attention(nn.Module):
    """Grouped-query attention.

    inputs: width of its input. rotary, head_norms: whether it has them.
    """

    def __init__(self, c: dict[str, Any], inputs: int, rotary: bool, head_norms: bool) -> None:
        super().__init__()
        d = c["head_dim"]
        heads = c["num_attention_heads"]
        kv_heads = c["num_key_value_heads"]
        self.d = d
        self.rotary = rotary
        self.q_proj = matrix(inputs, heads * d)
        self.k_proj = matrix(inputs, kv_heads * d)
        self.v_proj = matrix(inputs, kv_heads * d)
        self.o_proj = matrix(heads * d, c["hidden_size"])
        self.q_norm = Norm(d, 1.0) if head_norms else None
        self.k_norm = Norm(d, 1.0) if head_norms else None

    def weights(self, positions: Positions) -> list[Any]:
        """Return the arguments of heads_of after its input."""
        return [
            (positions.cos, positions.sin) if self.rotary else None,
            self.q_proj.weight,
            self.k_proj.weight,
            self.v_proj.weight,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.d,
        ]

    def forward(self, x: Tensor, positions: Positions, fused: Fused, norm: Tensor) -> Tensor:
        """Return x + attention(norm(x)), x [N, hidden]."""
        q, k, v = fused(heads_in, x, norm, *self.weights(positions))
        output: Tensor = fused(heads_out, attend(positions, q, k, v), x, self.o_proj.weight)
        return output


class Block(nn.Module):
    """Layer of a mixer and a feed-forward, with the names of most checkpoints."""

    def __init__(self, c: dict[str, Any], mixer: nn.Module, feed: Any) -> None:
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], 1.0)
        self.self_attn = mixer
        self.post_attention_layernorm = Norm(c["hidden_size"], 1.0)
        self.mlp = feed

    def forward(self, x: Tensor, positions: Positions, fused: Fused) -> tuple[Tensor, Tensor]:
        """Return the layer's output [N, hidden] and its expert imbalance."""
        x = self.self_attn(x, positions, fused, self.input_layernorm.weight)
        norm = self.post_attention_layernorm.weight
        output: tuple[Tensor, Tensor] = fused(self.mlp.function, x, norm, *self.mlp.weights())
        return output
