"""Qwen3.5 text model in plain PyTorch, dense or with experts, with its MTP module.

Parameter names are those of the checkpoint. The gated delta rule is the chunked (WY) form in fp32.
flash-linear-attention is not used: its backward pass refuses to run on Hopper with Triton 3.4 to
3.7.0, where it is wrong (its issue 640).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.base import LanguageModel, MTPModule, Trunk
from training.models.feed_forward import feed_forward
from training.models.functional import (
    Fused,
    Norm,
    Positions,
    attend,
    centered_rms,
    convolve,
    decay_matrix,
    linear,
    matrix,
    rms,
    rotate,
    to_chunks,
)

Feed = Callable[..., tuple[Tensor, Tensor]]

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
}

MOE: dict[str, Any] = {
    **{name: value for name, value in CONFIG.items() if name != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 192,
    "num_attention_heads": 4,
    "linear_num_value_heads": 4,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "router_aux_loss_coef": 0.01,
}


def attention_in(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor,
    q_norm: Tensor, k_norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, gate [N, H, D], k, v [N, KV, D] of x [N, hidden]."""
    d = q_norm.shape[0]
    h = centered_rms(x, norm)
    q, gate = linear(h, wq).unflatten(-1, (-1, 2 * d)).chunk(2, -1)
    k = linear(h, wk).unflatten(-1, (-1, d))
    v = linear(h, wv).unflatten(-1, (-1, d))
    q = rotate(centered_rms(q, q_norm), cos, sin)
    k = rotate(centered_rms(k, k_norm), cos, sin)
    return q, gate, k, v


def attention_out(
    o: Tensor, gate: Tensor, x: Tensor, wo: Tensor, feed: Feed, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Return feed(x + projected attention, *rest): the output of the block.

    o, gate [N, H, D].
    """
    return feed(x + linear((o * torch.sigmoid(gate)).flatten(1), wo), *rest)


def delta_in(
    x: Tensor, positions: Tensor, norm: Tensor, w_qkv: Tensor, w_z: Tensor, w_b: Tensor,
    w_a: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, heads: int, d: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the tensors of the chunked delta rule.

    x [N, hidden] -> q, k, v, g, beta by chunks [N / 64, H, 64, ...] fp32, the matrix to invert, the
    attention within chunks, and z [N, HV, V].
    """
    h = centered_rms(x, norm)
    raw = linear(h, w_qkv)
    mixed = convolve(raw, conv, positions)
    q, k, v = F.silu(mixed).float().split([heads * d, heads * d, raw.shape[1] - 2 * heads * d], -1)
    g = -torch.exp(a_log) * F.softplus(linear(h, w_a).float() + dt_bias)
    beta = torch.sigmoid(linear(h, w_b).float())

    q = to_chunks(q, d)
    k = to_chunks(k, d)
    v = to_chunks(v, d)
    q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    g = to_chunks(g, 1)[..., 0].cumsum(-1)
    beta = to_chunks(beta, 1)
    q = q * d**-0.5
    group = v.shape[1] // heads
    decay = decay_matrix(g)
    lower = ((k @ k.mT).repeat_interleave(group, 1) * beta * decay).tril(-1)
    inside = (q @ k.mT).repeat_interleave(group, 1) * decay
    z = linear(h, w_z).unflatten(-1, (-1, d))
    return q, k, v, g, beta, lower, inside, z


def delta_states(
    inverse: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return u, w, and the map of each chunk on the state: S -> a S + b."""
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    u = inverse @ (v * beta)
    w = inverse @ (k * beta * torch.exp(g)[..., None])
    decayed_k = (k * torch.exp(g[..., -1:] - g)[..., None]).mT
    fade = torch.exp(g[..., -1])[..., None, None] * torch.eye(k.shape[-1], device=k.device)
    return u, w, fade - decayed_k @ w, decayed_k @ u


def delta_out(
    before: Tensor, u: Tensor, w: Tensor, inside: Tensor, q: Tensor, g: Tensor, z: Tensor,
    x: Tensor, norm: Tensor, wo: Tensor, feed: Feed, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return feed(x + projected mixer output, *rest): the output of the block.

    before: states before the chunks.
    """
    q = q.repeat_interleave(u.shape[1] // q.shape[1], 1) * torch.exp(g)[..., None]
    o = q @ before + inside @ (u - w @ before)
    o = rms(o.transpose(1, 2).reshape(z.shape), norm)
    gated = (o * F.silu(z.float())).to(x.dtype)
    return feed(x + linear(gated.flatten(1), wo), *rest)


def draft_in(e: Tensor, h: Tensor, norm_e: Tensor, norm_h: Tensor, fc: Tensor) -> Tensor:
    """Return the input of the MTP layer: projected embedding and hidden state."""
    return linear(torch.cat([centered_rms(e, norm_e), centered_rms(h, norm_h)], -1), fc)


def invert(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1."""
    if lower.is_cuda:
        from training.models.delta_rule_kernels import Invert

        return Invert.apply(lower)
    eye = torch.eye(lower.shape[-1])
    return torch.linalg.solve_triangular(eye + lower, eye.expand_as(lower), upper=False)


def walk(a: Tensor, b: Tensor) -> Tensor:
    """Return the states before the chunks [B, chunks, H, K, V]."""
    if a.is_cuda:
        from training.models.delta_rule_kernels import Scan

        return Scan.apply(a, b)
    state = torch.zeros_like(b[:, 0])
    before = []
    for i in range(a.shape[1]):
        before.append(state)
        state = a[:, i] @ state + b[:, i]
    return torch.stack(before, 1)


class Attention(nn.Module):
    """Gated attention with head norms."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        d = c["head_dim"]
        self.q_proj = matrix(h, c["num_attention_heads"] * d * 2)
        self.k_proj = matrix(h, c["num_key_value_heads"] * d)
        self.v_proj = matrix(h, c["num_key_value_heads"] * d)
        self.o_proj = matrix(c["num_attention_heads"] * d, h)
        self.q_norm = Norm(d)
        self.k_norm = Norm(d)

    def forward(
        self, x: Tensor, positions: Positions, fused: Fused, norm: Tensor, rest: list[Any]
    ) -> tuple[Tensor, Tensor]:
        q, gate, k, v = fused(
            attention_in, x, positions.cos, positions.sin, norm, self.q_proj.weight,
            self.k_proj.weight, self.v_proj.weight, self.q_norm.weight, self.k_norm.weight,
        )  # fmt: skip
        o = attend(positions, q, k, v)
        return fused(attention_out, o, gate, x, self.o_proj.weight, *rest)


class DeltaNet(nn.Module):
    """Gated DeltaNet."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hk = c["linear_num_key_heads"]
        hv = c["linear_num_value_heads"]
        d = c["linear_key_head_dim"]
        h = c["hidden_size"]
        channels = (2 * hk + hv) * d
        self.heads = hk
        self.d = d
        self.in_proj_qkv = matrix(h, channels)
        self.in_proj_z = matrix(h, hv * d)
        self.in_proj_b = matrix(h, hv)
        self.in_proj_a = matrix(h, hv)
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.log(torch.empty(hv).uniform_(1, 16)))
        step = torch.exp(torch.empty(hv).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = Norm(d, 1.0)
        self.out_proj = matrix(hv * d, h)

    def forward(
        self, x: Tensor, positions: Positions, fused: Fused, norm: Tensor, rest: list[Any]
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, lower, inside, z = fused(
            delta_in, x, positions.flat, norm, self.in_proj_qkv.weight, self.in_proj_z.weight,
            self.in_proj_b.weight, self.in_proj_a.weight, self.conv1d.weight, self.A_log,
            self.dt_bias, self.heads, self.d,
        )  # fmt: skip
        u, w, a, b = fused(delta_states, invert(lower), k, v, g, beta)
        before = walk(*(y.unflatten(0, (positions.rows, -1)) for y in (a, b))).flatten(0, 1)
        return fused(
            delta_out, before, u, w, inside, q, g, z, x, self.norm.weight, self.out_proj.weight,
            *rest,
        )  # fmt: skip


class Block(nn.Module):
    """Decoder layer."""

    def __init__(self, c: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"])
        self.mixer = "self_attn" if kind == "full_attention" else "linear_attn"
        setattr(self, self.mixer, Attention(c) if kind == "full_attention" else DeltaNet(c))
        self.post_attention_layernorm = Norm(c["hidden_size"])
        self.mlp = feed_forward(c)

    def forward(self, x: Tensor, positions: Positions, fused: Fused) -> tuple[Tensor, Tensor]:
        """Return the layer's output [N, hidden] and its expert imbalance."""
        rest = [self.mlp.function, self.post_attention_layernorm.weight, *self.mlp.weights()]
        return getattr(self, self.mixer)(x, positions, fused, self.input_layernorm.weight, rest)


class Draft(MTPModule):
    """MTP module."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.fc = matrix(2 * h, h)
        self.pre_fc_norm_embedding = Norm(h)
        self.pre_fc_norm_hidden = Norm(h)
        self.layers = nn.ModuleList([Block(c, "full_attention")])
        self.norm = Norm(h)

    def forward(
        self, e: Tensor, h: Tensor, positions: Positions, fused: Fused
    ) -> tuple[Tensor, Tensor]:
        x = fused(
            draft_in, e, h, self.pre_fc_norm_embedding.weight, self.pre_fc_norm_hidden.weight,
            self.fc.weight,
        )  # fmt: skip
        x, imbalance = self.layers[0](x, positions, fused)
        return fused(centered_rms, x, self.norm.weight), imbalance


class Model(LanguageModel):
    """Qwen3.5 with parameters `model.*` and `mtp.*`."""

    def __init__(self, c: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> None:
        rope = c["rope_parameters"]
        rotary_dim = int(c["head_dim"] * rope["partial_rotary_factor"])
        super().__init__(c, dtype, rotary_dim, rope["rope_theta"])
        self.model = Trunk(c, [Block(c, kind) for kind in c["layer_types"]], start=0.0)
        self.mtp = Draft(c)
        self.begin()

    @property
    def drafter(self) -> Draft:
        return self.mtp

    def last(self, x: Tensor) -> Tensor:
        """Return x after the final norm."""
        output: Tensor = self.fused(centered_rms, x, self.model.norm.weight)
        return output
