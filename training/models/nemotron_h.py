"""Nemotron-H in plain PyTorch: Mamba-2, attention without positions, mixtures, and an MTP module.

The MTP module is that of Nemotron 3 Super. Mamba-2 is the chunked (SSD) form in fp32: Dao and Gu,
arXiv 2405.21060, section 6.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.attention import Attention
from training.models.base import LanguageModel, MTPModule, draft_in
from training.models.feed_forward import SigmoidMixture
from training.models.functional import (
    Fused,
    Norm,
    Positions,
    convolve,
    decay_matrix,
    linear,
    matrix,
    rms,
    to_chunks,
)

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 4096,
    "hidden_size": 192,
    "hybrid_override_pattern": "MEMEM*EMEMEM*E",
    "num_hidden_layers": 14,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "attention_bias": False,
    "mamba_num_heads": 6,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 64,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "chunk_size": 64,
    "intermediate_size": 96,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 96,
    "router_aux_loss_coef": 0.01,
    "layer_norm_epsilon": 1e-6,
    "residual_in_fp32": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def mamba_in(
    x: Tensor, positions: Tensor, norm: Tensor, w_in: Tensor, conv: Tensor, conv_bias: Tensor,
    a_log: Tensor, dt_bias: Tensor, skip: Tensor, groups: int, n: int, p: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the tensors of the chunked form, [N / 64, H, ...] fp32, and z [N, H P].

    They are: outputs without the state before the chunk [64, P], the chunk's contribution to the
    state [S, P], readers of the state before the chunk [64, S], and the log decay of that state
    over the chunk.
    """
    heads = a_log.shape[0]
    inner = heads * p
    h = rms(x, norm)
    z, raw, dt = linear(h, w_in).split([inner, inner + 2 * groups * n, heads], -1)
    mixed = F.silu(convolve(raw, conv, positions).float() + conv_bias)
    u, b, c = mixed.split([inner, groups * n, groups * n], -1)
    step = F.softplus(dt.float() + dt_bias)
    g = to_chunks(-torch.exp(a_log) * step, 1)[..., 0].cumsum(-1)
    u = to_chunks(u, p)
    b = to_chunks(b, n)
    c = to_chunks(c, n)
    written = u * to_chunks(step, 1)
    inside = (c @ b.mT).repeat_interleave(heads // groups, 1) * decay_matrix(g)
    y = inside @ written + skip[:, None, None] * u
    decayed_b = b.repeat_interleave(heads // groups, 1) * torch.exp(g[..., -1:] - g)[..., None]
    reads = c.repeat_interleave(heads // groups, 1) * torch.exp(g)[..., None]
    return y, decayed_b.mT @ written, reads, g[..., -1], z


def states_before(added: Tensor, fade: Tensor, rows: int) -> Tensor:
    """Return the state before each chunk [M, H, S, P], a weighted sum over earlier chunks of its
    row.

    added [M, H, S, P], fade [M, H]: contributions and log decays of the chunks of `rows` rows.
    """
    total = fade.unflatten(0, (rows, -1)).mT.cumsum(-1)
    before = F.pad(total, (1, 0))[..., :-1]
    count = total.shape[-1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=fade.device).tril(-1)
    reach = torch.exp(
        (before[..., :, None] - total[..., None, :]).masked_fill(~earlier, -torch.inf)
    )
    by_head = added.unflatten(0, (rows, -1)).transpose(1, 2)
    states = (reach @ by_head.flatten(3)).view(by_head.shape)
    return states.transpose(1, 2).flatten(0, 1)


def mamba_out(
    before: Tensor, y: Tensor, reads: Tensor, z: Tensor, x: Tensor, norm: Tensor, wo: Tensor,
    groups: int,
) -> Tensor:  # fmt: skip
    """Return x plus the mixer's output, which is gated and normed by groups.

    before: states before the chunks.
    """
    y = (y + reads @ before).transpose(1, 2).reshape(z.shape)
    gated = (y * F.silu(z.float())).unflatten(1, (groups, -1))
    return x + linear(rms(gated, norm.view(groups, -1)).flatten(1).to(x.dtype), wo)


class Mamba2(nn.Module):
    """Mixer of Mamba-2."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        heads = c["mamba_num_heads"]
        p = c["mamba_head_dim"]
        groups = c["n_groups"]
        n = c["ssm_state_size"]
        inner = heads * p
        channels = inner + 2 * groups * n
        self.groups = groups
        self.sizes = [groups, n, p]
        self.in_proj = matrix(h, inner + channels + heads)
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels, bias=True)
        self.A_log = nn.Parameter(torch.log(torch.empty(heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(heads))
        step = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = Norm(inner, 1.0)
        self.out_proj = matrix(inner, h)

    def forward(self, x: Tensor, positions: Positions, fused: Fused, norm: Tensor) -> Tensor:
        """Return x + Mamba-2(norm(x)), x [N, hidden]."""
        y, added, reads, fade, z = fused(
            mamba_in, x, positions.flat, norm, self.in_proj.weight, self.conv1d.weight,
            self.conv1d.bias, self.A_log, self.dt_bias, self.D, *self.sizes,
        )  # fmt: skip
        before = states_before(added, fade, positions.rows)
        output: Tensor = fused(
            mamba_out, before, y, reads, z, x, self.norm.weight, self.out_proj.weight, self.groups
        )
        return output


class HalfBlock(nn.Module):
    """Norm and mixer."""

    def __init__(self, c: dict[str, Any], mixer: nn.Module) -> None:
        super().__init__()
        self.norm = Norm(c["hidden_size"], 1.0)
        self.mixer = mixer

    def forward(self, x: Tensor, positions: Positions, fused: Fused) -> tuple[Tensor, Tensor]:
        """Return the output [N, hidden], and 0."""
        x = self.mixer(x, positions, fused, self.norm.weight)
        return x, x.new_zeros((), dtype=torch.float32)


class MixtureBlock(HalfBlock):
    """Norm and mixture of experts, which checkpoints also call mixer."""

    def forward(self, x: Tensor, positions: Positions, fused: Fused) -> tuple[Tensor, Tensor]:
        """Return the output [N, hidden] and the expert imbalance."""
        feed = self.mixer
        output: tuple[Tensor, Tensor] = fused(feed.function, x, self.norm.weight, *feed.weights())
        return output


def block(c: dict[str, Any], letter: str) -> HalfBlock:
    """Return the block of a letter of hybrid_override_pattern."""
    if letter == "M":
        return HalfBlock(c, Mamba2(c))
    if letter == "*":
        return HalfBlock(c, Attention(c, c["hidden_size"], rotary=False, head_norms=False))
    inner = c["moe_shared_expert_intermediate_size"]
    return MixtureBlock(c, SigmoidMixture(c, inner, gated=False))


class Backbone(nn.Module):
    """Embedding, blocks, and final norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(block(c, letter) for letter in c["hybrid_override_pattern"])
        self.norm_f = Norm(c["hidden_size"], 1.0)


class Draft(MTPModule):
    """MTP module. The first block has the input projection, the last one the final norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.layers = nn.ModuleList(block(c, k) for k in c["mtp_hybrid_override_pattern"])
        first = self.layers[0]
        first.enorm = Norm(h, 1.0)
        first.hnorm = Norm(h, 1.0)
        first.eh_proj = matrix(2 * h, h)
        self.layers[-1].final_layernorm = Norm(h, 1.0)

    def forward(
        self, e: Tensor, h: Tensor, positions: Positions, fused: Fused
    ) -> tuple[Tensor, Tensor]:
        first = self.layers[0]
        x = fused(draft_in, e, h, first.enorm.weight, first.hnorm.weight, first.eh_proj.weight)
        imbalance = []
        for layer in self.layers:
            x, layer_imbalance = layer(x, positions, fused)
            imbalance.append(layer_imbalance)
        return fused(rms, x, self.layers[-1].final_layernorm.weight), torch.stack(imbalance).sum()


class NemotronH(LanguageModel):
    """Nemotron-H with parameters `backbone.*` and `mtp.*`."""

    def __init__(self, c: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(c, dtype, 0, 1.0)
        self.backbone = Backbone(c)
        self.mtp = Draft(c)
        self.begin()

    @property
    def embedding(self) -> nn.Parameter:
        return self.backbone.embeddings.weight

    @property
    def blocks(self) -> Iterable[nn.Module]:
        return self.backbone.layers

    @property
    def drafter(self) -> Draft:
        return self.mtp

    def last(self, x: Tensor) -> Tensor:
        """Return x after the final norm."""
        output: Tensor = self.fused(rms, x, self.backbone.norm_f.weight)
        return output
