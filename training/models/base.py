"""Interface between the trainer and a model: hidden states, drafts, head, checkpoint files."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from training.models.functional import Fused, Norm, Positions, linear, rms

SHRUNK = ("o_proj", "out_proj", "down_proj")
"""Matrices that write to the residual stream; their initial values are scaled down."""


class Drafter(Protocol):
    """Module that drafts in a chain."""

    def unroll(
        self, embedded: Tensor, read: Tensor, positions: Positions, fused: Fused, count: int
    ) -> tuple[list[Tensor], Tensor]:
        """Return `count` hidden states for the head, and the expert imbalance of each step [count].

        embedded [N, hidden]: embedding of each next token. read [N, ...]: states of the target. The
        s-th result is teacher-forced s steps after the target.
        """


class Trunk(nn.Module):
    """Modules `embed_tokens`, `layers` and `norm`, as most checkpoints name them.

    start: initial weight of the norm.
    """

    def __init__(self, c: dict[str, Any], layers: Iterable[nn.Module], start: float = 1.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(c["hidden_size"], start)


class LanguageModel(nn.Module):
    """Model with the parameter names of its checkpoint; its head is its embedding.

    Embedding, blocks and final norm are those of `model`; other families override these properties.
    Activations have dtype `dtype`.
    rotary_dim, theta: dims of a head with rotary positions, and their base.
    aux_layers: layers whose input the drafter reads. Without any it reads the final hidden states.
    derived: tensors of the files that are computed from parameters.
    """

    model: Trunk
    aux_layers: tuple[int, ...] = ()
    derived: frozenset[str] = frozenset()

    def __init__(
        self, c: dict[str, Any], dtype: torch.dtype, rotary_dim: int, theta: float
    ) -> None:
        super().__init__()
        self.c = c
        self.dtype = dtype
        self.rotary_dim = rotary_dim
        self.theta = theta
        self.fused = Fused()
        self.positions: dict[tuple[int, int], Positions] = {}

    @property
    def embedding(self) -> nn.Parameter:
        """Return the embedding [vocab, hidden]."""
        return self.model.embed_tokens.weight

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """Return the blocks. Each maps (x [N, hidden], Positions, Fused) to x and its expert
        imbalance."""
        return self.model.layers

    @property
    def drafter(self) -> Drafter | None:
        """Return the draft module, if the model has one."""
        return None

    @property
    def draft_head(self) -> Tensor:
        """Return the head of the drafts."""
        return self.embedding

    def last(self, x: Tensor) -> Tensor:
        """Return x after the final norm."""
        output: Tensor = self.fused(rms, x, self.model.norm.weight)
        return output

    def configs(self) -> dict[str, dict[str, Any]]:
        """Return the config.json of each folder of the checkpoint, "" for the model's own.

        Parameter names of a folder begin with its name; all others belong to the model.
        """
        return {"": self.c}

    def begin(self) -> None:
        """Draw the initial weights."""
        for name, p in self.named_parameters():
            if p.dim() == 2 or "experts" in name:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[-1] ** -0.5)
            if any(part in name for part in SHRUNK):
                p.data.mul_(0.3)

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states after the final norm, the drafter's input, and expert imbalance.

        ids [B, T], T a multiple of 64 -> [B * T, hidden], [B * T, ...], [layers].
        """
        positions = self._positions_of(ids)
        imbalance = []
        aux_states = []
        x = self._embed(ids)
        for i, block in enumerate(self.blocks):
            if i in self.aux_layers:
                aux_states.append(x.detach())
            x, block_imbalance = block(x, positions, self.fused)
            imbalance.append(block_imbalance)
        hidden = self.last(x)
        return hidden, torch.cat(aux_states, -1) if aux_states else hidden, torch.stack(imbalance)

    def drafts(self, ids: Tensor, read: Tensor, count: int) -> tuple[list[Tensor], Tensor]:
        """Return `count` hidden states [B * T, hidden] and the expert imbalance of each step
        [count].

        At t they predict ids[t + 2]. The s-th is teacher-forced s steps after the target: valid
        from t = s on. Both are empty without a drafter.
        """
        if self.drafter is None:
            return [], read.new_zeros(0)
        embedded = self._embed(F.pad(ids[:, 1:], (0, 1)))
        return self.drafter.unroll(embedded, read, self._positions_of(ids), self.fused, count)

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits."""
        return linear(hidden, self.embedding)

    def files(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each folder of the checkpoint."""
        tensors_by_folder: dict[str, dict[str, Tensor]] = {name: {} for name in self.configs()}
        for name, tensor in self.state_dict().items():
            first, _, rest = name.partition(".")
            inner = first in tensors_by_folder
            tensors_by_folder[first if inner else ""][rest if inner else name] = tensor
        return tensors_by_folder

    def load(self, folder: Path) -> None:
        """Load a checkpoint that training saved."""
        state = {}
        for name in self.configs():
            prefix = f"{name}." if name else ""
            tensors = load_file(folder / name / "model.safetensors")
            state.update({f"{prefix}{key}": tensor for key, tensor in tensors.items()})
        self.load_state_dict({n: tensor for n, tensor in state.items() if n not in self.derived})

    def _embed(self, ids: Tensor) -> Tensor:
        """Return embeddings [B * T, hidden]."""
        return F.embedding(ids.flatten(), self.embedding).to(self.dtype)

    def _positions_of(self, ids: Tensor) -> Positions:
        """Return cached positions of rows with this shape."""
        shape = (ids.shape[0], ids.shape[1])
        if shape not in self.positions:
            self.positions[shape] = Positions(*shape, self.rotary_dim, self.theta, ids.device)
        return self.positions[shape]


def shift_by_one(state: Tensor, positions: Positions) -> Tensor:
    """Return the state [N, hidden] of the previous position in the row, 0 at its first."""
    return F.pad(state[:-1], (0, 0, 1, 0)) * (positions.flat > 0)[:, None]


def draft_in(e: Tensor, h: Tensor, e_norm: Tensor, h_norm: Tensor, projection: Tensor) -> Tensor:
    """Return the input of an MTP module's first layer: projected embedding and hidden state."""
    return linear(torch.cat([rms(e, e_norm), rms(h, h_norm)], -1), projection)


class MTPModule(nn.Module, ABC):
    """MTP module: the state of each step is its output of the previous step."""

    @abstractmethod
    def forward(
        self, e: Tensor, h: Tensor, positions: Positions, fused: Fused
    ) -> tuple[Tensor, Tensor]:
        """Compute one step.

        e, h [N, hidden]: embeddings and hidden states -> normed hidden states, and expert
        imbalance.
        """

    def unroll(
        self, embedded: Tensor, read: Tensor, positions: Positions, fused: Fused, count: int
    ) -> tuple[list[Tensor], Tensor]:
        """Return drafts; see Drafter. A step attends to its own outputs at earlier positions."""
        states = []
        imbalance = []
        hidden = read
        for _ in range(count):
            hidden, step_imbalance = self(embedded, hidden, positions, fused)
            states.append(hidden)
            imbalance.append(step_imbalance)
            hidden = shift_by_one(hidden, positions)
        return states, torch.stack(imbalance)
