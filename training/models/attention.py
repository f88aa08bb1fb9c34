"""Attention as most families have it: grouped queries, with norms on heads and rotary positions or
without."""

from typing import Any

from torch import Tensor, nn

from training.models.functional import Fused, Norm, Places, attend, linear, matrix, rms, rotate


def heads_of(
    h: Tensor, angles: tuple[Tensor, Tensor] | None, wq: Tensor, wk: Tensor, wv: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, d: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h [N, hidden], normed -> q [N, H, D], k, v [N, KV, D]. angles: cos and sin [N, R / 2]."""
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
    """x [N, hidden] -> heads_of(norm(x), *rest)."""
    return heads_of(rms(x, norm), *rest)


def heads_out(o: Tensor, x: Tensor, wo: Tensor) -> Tensor:
    """o [N, H, D] -> x + its projection."""
    return x + linear(o.flatten(1), wo)


class Attention(nn.Module):
    """inputs: width of what it reads. rotary, head_norms: whether it has them."""

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

    def weights(self, places: Places) -> list[Any]:
        """What heads_of takes behind its input."""
        return [
            (places.cos, places.sin) if self.rotary else None,
            self.q_proj.weight,
            self.k_proj.weight,
            self.v_proj.weight,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.d,
        ]

    def forward(self, x: Tensor, places: Places, fused: Fused, norm: Tensor) -> Tensor:
        """x [N, hidden] -> x + attention of norm(x)."""
        q, k, v = fused(heads_in, x, norm, *self.weights(places))
        found: Tensor = fused(heads_out, attend(places, q, k, v), x, self.o_proj.weight)
        return found


class Block(nn.Module):
    """A layer of a mixer and a feed-forward, under the names that most checkpoints have."""

    def __init__(self, c: dict[str, Any], mixer: nn.Module, feed: Any) -> None:
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], 1.0)
        self.self_attn = mixer
        self.post_attention_layernorm = Norm(c["hidden_size"], 1.0)
        self.mlp = feed

    def forward(self, x: Tensor, places: Places, fused: Fused) -> tuple[Tensor, Tensor]:
        """x [N, hidden] -> the same, and how unevenly experts are used."""
        x = self.self_attn(x, places, fused, self.input_layernorm.weight)
        norm = self.post_attention_layernorm.weight
        found: tuple[Tensor, Tensor] = fused(self.mlp.function, x, norm, *self.mlp.weights())
        return found
