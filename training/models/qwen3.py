"""Qwen3 in plain PyTorch, with an EAGLE-3 head beside it or without; and a smaller one that drafts.

The head is trained along on what the model has become so far, which hears nothing of it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.attention import Attention, Block, heads_of, heads_out
from training.models.base import Language, Trunk, one_behind
from training.models.feed_forward import MLP, swiglu
from training.models.functional import Fused, Norm, Places, linear, matrix, rms

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
"""The draft model."""

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
"""Tokens at the end of the vocabulary that a head always knows: the special ones are among them."""


def draft_tokens(vocab: int, count: int) -> Tensor:
    """The tokens that a head knows [count]: BPE's first, which are the most frequent, and LAST."""
    return torch.cat([torch.arange(count - LAST), torch.arange(vocab - LAST, vocab)])


def head_in(
    e: Tensor, state: Tensor, e_norm: Tensor, state_norm: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings and states [N, hidden] -> heads_of both together, the embedding first."""
    return heads_of(torch.cat([rms(e, e_norm), rms(state, state_norm)], -1), *rest)


class HeadLayer(nn.Module):
    """The layer of an EAGLE-3 head."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        self.input_layernorm = Norm(h, 1.0)
        self.hidden_norm = Norm(h, 1.0)
        self.self_attn = Attention(c, 2 * h, rotary=True, head_norms=False)
        self.post_attention_layernorm = Norm(h, 1.0)
        self.mlp = MLP(h, c["intermediate_size"])


def chain_mask(length: int, step: int, device: torch.device) -> Tensor:
    """[T, (step + 1) T]: which keys the s-th step sees, those of steps 0 to s side by side.

    At t it has read true states up to t - s, and of each later step the one state of its own chain.
    """
    at = torch.arange(length, device=device)
    gap = at[:, None] - at
    return torch.cat([gap >= step, *(gap == step - i for i in range(1, step + 1))], -1)


class Eagle3(nn.Module):
    """An EAGLE-3 head (Li et al., arXiv 2503.01840), trained over the steps that it will draft."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        taps = len(c["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.groups = c["num_attention_heads"] // c["num_key_value_heads"]
        self.fc = matrix(taps * c["target_hidden_size"], h)
        self.midlayer = HeadLayer(c)
        self.norm = Norm(h, 1.0)
        self.masks: dict[tuple[int, int], Tensor] = {}

    def unroll(
        self, embedded: Tensor, read: Tensor, places: Places, fused: Fused, count: int
    ) -> tuple[list[Tensor], Tensor]:
        """See training.language.Drafter. read: the taps side by side. A step attends to the true
        states of the places before its chain, and to those that the chain itself has made."""
        layer = self.midlayer
        attention = layer.self_attn
        embedded = embedded.detach()
        state = linear(read, self.fc.weight)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(count):
            heads = fused(
                head_in, embedded, state, layer.input_layernorm.weight, layer.hidden_norm.weight,
                *attention.weights(places),
            )  # fmt: skip
            q, k, v = places.by_rows(*heads)
            keys.append(k.repeat_interleave(self.groups, 1))
            values.append(v.repeat_interleave(self.groups, 1))
            o = self._attend(q, torch.cat(keys, 2), torch.cat(values, 2), step)
            o = o.transpose(1, 2).flatten(0, 1)
            x = fused(heads_out, o, state, attention.o_proj.weight)
            norm = layer.post_attention_layernorm.weight
            x, _ = fused(swiglu, x, norm, *layer.mlp.weights())
            found.append(fused(rms, x, self.norm.weight))
            state = one_behind(x, places)
        return found, state.new_zeros(count, dtype=torch.float32)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: int) -> Tensor:
        if step == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        length = q.shape[2]
        if (length, step) not in self.masks:
            self.masks[length, step] = chain_mask(length, step, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[length, step])


class Qwen3(Language):
    """`model.*`; its head in a folder of its own, `eagle3`, with the rows of the target's embedding
    for the tokens that it knows."""

    made = frozenset(("eagle3.lm_head.weight", "eagle3.d2t", "eagle3.t2d"))

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
            self.taps = tuple(head["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.begin()

    @property
    def drafter(self) -> Eagle3 | None:
        return self.eagle3

    @property
    def draft_head(self) -> Tensor:
        return self.embedding.detach()

    def configs(self) -> dict[str, dict[str, Any]]:
        """The model's, and its head's."""
        return {"": self.c} | ({} if self.head_config is None else {"eagle3": self.head_config})

    def files(self) -> dict[str, dict[str, Tensor]]:
        """See Language."""
        found = super().files()
        if self.head_config is not None:
            count = self.head_config["draft_vocab_size"]
            ids = draft_tokens(len(self.embedding), count)
            known = torch.zeros(len(self.embedding), dtype=torch.bool)
            known[ids] = True
            rows = self.embedding.detach()[ids.to(self.embedding.device)]
            head = {"lm_head.weight": rows, "d2t": ids - torch.arange(count), "t2d": known}
            found["eagle3"] |= head
        return found
