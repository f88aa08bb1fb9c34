"""DeepSeek-V3 in plain PyTorch: latent attention, a dense layer, mixtures, and its MTP module.

The latents are expanded to keys and values of every head. Source: arXiv 2412.19437, section 2.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from training.models.attention import Block, heads_out
from training.models.base import LanguageModel, MTPModule, Trunk, draft_in
from training.models.feed_forward import MLP, SigmoidMixture
from training.models.functional import (
    Fused,
    Norm,
    Positions,
    attend,
    linear,
    matrix,
    rms,
    rotate_pairs,
)

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "hidden_act": "silu",
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "router_aux_loss_coef": 0.01,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def latent_in(
    x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, q_a: Tensor, q_norm: Tensor, q_b: Tensor,
    kv_a: Tensor, kv_norm: Tensor, kv_b: Tensor, heads: int, rotary_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, k [N, H, plain + rotary_dim], v [N, H, V] of x [N, hidden]."""
    h = rms(x, norm)
    q = linear(rms(linear(h, q_a), q_norm), q_b).unflatten(-1, (heads, -1))
    plain = q.shape[-1] - rotary_dim
    kv = linear(h, kv_a)
    key = rotate_pairs(kv[:, None, -rotary_dim:], cos, sin).expand(-1, heads, -1)
    up = linear(rms(kv[:, :-rotary_dim], kv_norm), kv_b).unflatten(-1, (heads, -1))
    q = torch.cat([q[..., :plain], rotate_pairs(q[..., plain:], cos, sin)], -1)
    k = torch.cat([up[..., :plain], key], -1)
    return q, k, up[..., plain:].contiguous()


class LatentAttention(nn.Module):
    """Multi-head latent attention with latent queries."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        heads = c["num_attention_heads"]
        plain = c["qk_nope_head_dim"]
        rotary_dim = c["qk_rope_head_dim"]
        latent = c["kv_lora_rank"]
        value = c["v_head_dim"]
        self.sizes = [heads, rotary_dim]
        self.q_a_proj = matrix(h, c["q_lora_rank"])
        self.q_a_layernorm = Norm(c["q_lora_rank"], 1.0)
        self.q_b_proj = matrix(c["q_lora_rank"], heads * (plain + rotary_dim))
        self.kv_a_proj_with_mqa = matrix(h, latent + rotary_dim)
        self.kv_a_layernorm = Norm(latent, 1.0)
        self.kv_b_proj = matrix(latent, heads * (plain + value))
        self.o_proj = matrix(heads * value, h)

    def forward(self, x: Tensor, positions: Positions, fused: Fused, norm: Tensor) -> Tensor:
        """Return x + attention(norm(x)), x [N, hidden]."""
        q, k, v = fused(
            latent_in, x, norm, positions.cos, positions.sin, self.q_a_proj.weight,
            self.q_a_layernorm.weight, self.q_b_proj.weight, self.kv_a_proj_with_mqa.weight,
            self.kv_a_layernorm.weight, self.kv_b_proj.weight, *self.sizes,
        )  # fmt: skip
        output: Tensor = fused(heads_out, attend(positions, q, k, v), x, self.o_proj.weight)
        return output


def mixture(c: dict[str, Any]) -> SigmoidMixture:
    """Return a layer's mixture; its shared experts are one wider expert."""
    return SigmoidMixture(c, c["n_shared_experts"] * c["moe_intermediate_size"], gated=True)


class SharedHead(nn.Module):
    """Final norm of the MTP module. Its head is the model's."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.norm = Norm(h, 1.0)


class Draft(MTPModule, Block):
    """MTP module: one more layer with an input projection and a final norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        Block.__init__(self, c, LatentAttention(c), mixture(c))
        h = c["hidden_size"]
        self.enorm = Norm(h, 1.0)
        self.hnorm = Norm(h, 1.0)
        self.eh_proj = matrix(2 * h, h)
        self.shared_head = SharedHead(h)

    def forward(
        self, e: Tensor, h: Tensor, positions: Positions, fused: Fused
    ) -> tuple[Tensor, Tensor]:
        x = fused(draft_in, e, h, self.enorm.weight, self.hnorm.weight, self.eh_proj.weight)
        x, imbalance = Block.forward(self, x, positions, fused)
        return fused(rms, x, self.shared_head.norm.weight), imbalance


class DeepseekV3(LanguageModel):
    """DeepSeek-V3 with parameters `model.*`; the MTP module is the layer after the last one."""

    def __init__(self, c: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(c, dtype, c["qk_rope_head_dim"], c["rope_theta"])
        layers: list[nn.Module] = []
        for i in range(c["num_hidden_layers"]):
            dense = i < c["first_k_dense_replace"]
            feed = MLP(c["hidden_size"], c["intermediate_size"]) if dense else mixture(c)
            layers.append(Block(c, LatentAttention(c), feed))
        self.model = Trunk(c, [*layers, Draft(c)])
        self.begin()

    @property
    def blocks(self) -> Iterable[nn.Module]:
        return self.model.layers[:-1]

    @property
    def drafter(self) -> Draft:
        draft: Draft = self.model.layers[-1]
        return draft
