"""The trained model in plain PyTorch: Qwen3.5 text, dense, with its MTP module.

Parameter names are the checkpoint's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64

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


class RMSNorm(nn.Module):
    """Zero-centred: the weight is stored around 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1 + self.weight, 1e-6).to(x.dtype)


class GatedNorm(nn.Module):
    """Plain RMS norm, then the gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-6)
        return (y * F.silu(gate.float())).to(gate.dtype)


def linear(k: int, n: int) -> nn.Linear:
    """A bias-free linear layer."""
    return nn.Linear(k, n, bias=False)


def rotate(x: Tensor, width: int, theta: float) -> Tensor:
    """x [B, T, H, D]: NeoX rotary on the first `width` dims."""
    inverse = theta ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * inverse
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b = x[..., : width // 2].float(), x[..., width // 2 : width].float()
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., width:]], -1)


class Attention(nn.Module):
    """Gated attention with q/k norms."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.c = c
        h, d = c["hidden_size"], c["head_dim"]
        self.q_proj = linear(h, c["num_attention_heads"] * d * 2)
        self.k_proj = linear(h, c["num_key_value_heads"] * d)
        self.v_proj = linear(h, c["num_key_value_heads"] * d)
        self.o_proj = linear(c["num_attention_heads"] * d, h)
        self.q_norm, self.k_norm = RMSNorm(d), RMSNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        c, d = self.c, self.c["head_dim"]
        rope = c["rope_parameters"]
        width = int(d * rope["partial_rotary_factor"])
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * d)).chunk(2, -1)
        k, v = (p(x).unflatten(-1, (-1, d)) for p in (self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q), width, rope["rope_theta"]).transpose(1, 2)
        k = rotate(self.k_norm(k), width, rope["rope_theta"]).transpose(1, 2)
        v = v.transpose(1, 2)
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        return self.o_proj((o.transpose(1, 2) * torch.sigmoid(gate)).flatten(2))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k [B, T, HV, K] (unnormalised), v [B, T, HV, V], g, beta [B, T, HV] -> [B, T, HV, V].

    The chunked (WY) form in fp32. flash-linear-attention would be faster, but refuses its backward
    pass on Hopper with Triton 3.4 to 3.7.0, where it is wrong (its issue 640).
    """
    dtype = v.dtype
    q, k, v, beta = q.float(), k.float(), v.float(), beta.float()
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    length = q.shape[1]

    def cut(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -length % CHUNK))
        return x.unflatten(1, (-1, CHUNK)).transpose(2, 3)

    q, k, v = cut(q), cut(k), cut(v)
    g, beta = cut(g[..., None])[..., 0].cumsum(-1), cut(beta[..., None])
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp((g[..., :, None] - g[..., None, :]).masked_fill(~causal, -torch.inf))
    inner = ((k * beta) @ k.transpose(-1, -2) * decay).tril(-1)
    inner = inner + torch.eye(CHUNK, device=q.device)
    grown = torch.exp(g)[..., None]
    right = torch.cat([v * beta, k * beta * grown], -1)
    solved = torch.linalg.solve_triangular(inner, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    left = (k * torch.exp(g[..., -1:] - g)[..., None]).transpose(-1, -2)
    fade = torch.exp(g[..., -1])[..., None, None] * torch.eye(k.shape[-1], device=q.device)
    after = scan(fade - left @ w, left @ u)
    before = F.pad(after[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    new = u - w @ before
    out = (q * grown) @ before + ((q @ k.transpose(-1, -2)) * decay) @ new
    return out.transpose(2, 3).flatten(1, 2)[:, :length].to(dtype)


def scan(a: Tensor, b: Tensor) -> Tensor:
    """s[c] = a[c] s[c-1] + b[c] along dim 1, s[-1] = 0: by pairs, in log2 steps."""
    count = a.shape[1]
    if count == 1:
        return b
    even = count // 2 * 2
    a0, a1, b0, b1 = a[:, 0:even:2], a[:, 1:even:2], b[:, 0:even:2], b[:, 1:even:2]
    odd = scan(a1 @ a0, a1 @ b0 + b1)
    shifted = F.pad(odd[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    both = torch.stack([a0 @ shifted + b0, odd], 2).flatten(1, 2)
    if even == count:
        return both
    return torch.cat([both, (a[:, -1] @ both[:, -1] + b[:, -1])[:, None]], 1)


class DeltaNet(nn.Module):
    """Gated DeltaNet."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.hk, self.hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.dk, self.dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        h, channels = c["hidden_size"], 2 * self.hk * self.dk + self.hv * self.dv
        self.in_proj_qkv = linear(h, channels)
        self.in_proj_z = linear(h, self.hv * self.dv)
        self.in_proj_b, self.in_proj_a = linear(h, self.hv), linear(h, self.hv)
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.log(torch.empty(self.hv).uniform_(1, 16)))
        step = torch.exp(torch.empty(self.hv).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(self.dv)
        self.out_proj = linear(self.hv * self.dv, h)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.in_proj_qkv(x)
        past = F.pad(mixed, (0, 0, 3, 0))
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)
        length = mixed.shape[1]
        mixed = F.silu(sum(past[:, j : j + length] * taps[:, j] for j in range(4)))
        q, k, v = mixed.split([self.hk * self.dk] * 2 + [self.hv * self.dv], -1)
        group = self.hv // self.hk
        q, k = (t.unflatten(-1, (self.hk, -1)).repeat_interleave(group, 2) for t in (q, k))
        beta = torch.sigmoid(self.in_proj_b(x).float()).to(x.dtype)
        g = -torch.exp(self.A_log.float()) * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        o = delta_rule(q, k, v.unflatten(-1, (self.hv, -1)), g, beta)
        z = self.in_proj_z(x).unflatten(-1, (self.hv, -1))
        return self.out_proj(self.norm(o, z).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, h: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(h, inner), linear(h, inner)
        self.down_proj = linear(inner, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, c: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"])
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"])
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"])
        self.mixer_name = "self_attn" if kind == "full_attention" else "linear_attn"

    def forward(self, x: Tensor) -> Tensor:
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """The MTP module."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.fc = linear(2 * h, h)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(h), RMSNorm(h)
        self.layers = nn.ModuleList([Block(c, "full_attention")])
        self.norm = RMSNorm(h)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(torch.cat(pair, -1))))


class Trunk(nn.Module):
    """Embedding, blocks, norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c, kind) for kind in c["layer_types"])
        self.norm = RMSNorm(c["hidden_size"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class Model(nn.Module):
    """`model.*` and `mtp.*`; the head is the embedding."""

    def __init__(self, c: dict[str, Any] = CONFIG) -> None:
        super().__init__()
        self.model, self.mtp = Trunk(c), Draft(c)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                p.data.mul_(0.3)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def drafts(self, ids: Tensor, hidden: Tensor, count: int) -> list[Tensor]:
        """Hidden states that predict ids[t + 2 + s] at t, s = 0 .. count - 1 (teacher forced)."""
        found = []
        for s in range(count):
            after = F.pad(ids[:, 1:], (0, 1))
            embedded = self.model.embed_tokens(after).to(hidden.dtype)
            hidden = self.mtp(embedded, hidden)
            found.append(hidden)
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return found
