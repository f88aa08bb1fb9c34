"""Qwen3 in plain PyTorch, with an optional EAGLE-3 head, and a smaller draft model.

The head is trained together with the model, on detached states: the model gets no gradient from it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.attention import Attention, Block, heads_of, heads_out
from training.models.base import LanguageModel, Trunk, shift_by_one
from training.models.feed_forward import MLP, swiglu
from training.models.functional import Fused, Norm, Positions, linear, matrix, rms

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}

SMALL: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Config of the draft model."""

EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 4096,
    "draft_vocab_size": 3072,
    "hidden_size": 192,
    "target_hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "eagle_config": {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    },
    "torch_dtype": "bfloat16",
}

LAST = 16
"""Tokens at the end of the vocabulary that every head has; the special tokens are among them."""


def draft_tokens(vocab: int, count: int) -> Tensor:
    """Return the tokens of a draft vocabulary [count]: BPE's first, which are most frequent, and
    LAST."""
    return torch.cat([torch.arange(count - LAST), torch.arange(vocab - LAST, vocab)])


def head_in(
    e: Tensor, state: Tensor, e_norm: Tensor, state_norm: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads_of the normed and concatenated embeddings and states [N, hidden]."""
    return heads_of(torch.cat([rms(e, e_norm), rms(state, state_norm)], -1), *rest)


class HeadLayer(nn.Module):
    """Layer of an EAGLE-3 head."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.input_layernorm = Norm(h, 1.0)
        self.hidden_norm = Norm(h, 1.0)
        self.self_attn = Attention(c, 2 * h, rotary=True, head_norms=False)
        self.post_attention_layernorm = Norm(h, 1.0)
        self.mlp = MLP(h, c["intermediate_size"])


def chain_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Return the mask [T, (step + 1) T] of the keys of steps 0 to s that step s sees.

    At t it sees true states up to t - s, and one state of its chain for each later step.
    """
    at = torch.arange(length, device=device)
    gap = at[:, None] - at
    return torch.cat([gap >= step, *(gap == step - i for i in range(1, step + 1))], -1)


class Eagle3(nn.Module):
    """EAGLE-3 head, trained over the steps that it drafts.
    Source: Li et al., arXiv 2503.01840.
    """

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        num_aux = len(c["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.groups = c["num_attention_heads"] // c["num_key_value_heads"]
        self.fc = matrix(num_aux * c["target_hidden_size"], h)
        self.midlayer = HeadLayer(c)
        self.norm = Norm(h, 1.0)
        self.masks: dict[tuple[int, int], Tensor] = {}

    def unroll(
        self, embedded: Tensor, read: Tensor, positions: Positions, fused: Fused, count: int
    ) -> tuple[list[Tensor], Tensor]:
        """Return drafts; see base.Drafter.

        read: concatenated auxiliary hidden states. A step attends to the true states before its
        chain, and to the chain's own states.
        """
        layer = self.midlayer
        attention = layer.self_attn
        embedded = embedded.detach()
        state = linear(read, self.fc.weight)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states = []
        for step in range(count):
            heads = fused(
                head_in, embedded, state, layer.input_layernorm.weight, layer.hidden_norm.weight,
                *attention.weights(positions),
            )  # fmt: skip
            q, k, v = positions.by_rows(*heads)
            keys.append(k.repeat_interleave(self.groups, 1))
            values.append(v.repeat_interleave(self.groups, 1))
            o = self._attend(q, torch.cat(keys, 2), torch.cat(values, 2), step)
            o = o.transpose(1, 2).flatten(0, 1)
            x = fused(heads_out, o, state, attention.o_proj.weight)
            norm = layer.post_attention_layernorm.weight
            x, _ = fused(swiglu, x, norm, *layer.mlp.weights())
            states.append(fused(rms, x, self.norm.weight))
            state = shift_by_one(x, positions)
        return states, state.new_zeros(count, dtype=torch.float32)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: int) -> Tensor:
        """Return attention of the step's queries to the keys of all steps so far."""
        if step == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        length = q.shape[2]
        if (length, step) not in self.masks:
            self.masks[length, step] = chain_mask(length, step, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[length, step])


class Qwen3(LanguageModel):
    """Qwen3 with parameters `model.*`, and its EAGLE-3 head in folder `eagle3`.

    The head's lm_head has the rows of the target's embedding for the draft vocabulary.
    """

    derived = frozenset(("eagle3.lm_head.weight", "eagle3.d2t", "eagle3.t2d"))

    def __init__(
        self,
        c: dict[str, Any] = CONFIG,
        dtype: torch.dtype = torch.float32,
        head: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(c, dtype, c["head_dim"], c["rope_theta"])
        layers: list[nn.Module] = [
            Block(
                c,
                Attention(c, c["hidden_size"], rotary=True, head_norms=True),
                MLP(c["hidden_size"], c["intermediate_size"]),
            )
            for _ in range(c["num_hidden_layers"])
        ]
        self.model = Trunk(c, layers)
        self.head_config = head
        self.eagle3 = None if head is None else Eagle3(head)
        if head is not None:
            self.aux_layers = tuple(head["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.begin()

    @property
    def drafter(self) -> Eagle3 | None:
        return self.eagle3

    @property
    def draft_head(self) -> Tensor:
        return self.embedding.detach()

    def configs(self) -> dict[str, dict[str, Any]]:
        """Return the configs of the model and of its head."""
        return {"": self.c} | ({} if self.head_config is None else {"eagle3": self.head_config})

    def files(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the model and of its head."""
        tensors_by_folder = super().files()
        if self.head_config is not None:
            count = self.head_config["draft_vocab_size"]
            ids = draft_tokens(len(self.embedding), count)
            known = torch.zeros(len(self.embedding), dtype=torch.bool)
            known[ids] = True
            rows = self.embedding.detach()[ids.to(self.embedding.device)]
            head = {"lm_head.weight": rows, "d2t": ids - torch.arange(count), "t2d": known}
            tensors_by_folder["eagle3"] |= head
        return tensors_by_folder
