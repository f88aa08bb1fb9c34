"""What the trainer asks of a model: hidden states, drafts, a head, and its checkpoint's files."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from training.models.functional import Fused, Norm, Places, linear, rms

SHRUNK = ("o_proj", "out_proj", "down_proj")
"""Matrices whose output goes to the residual: they begin small."""


class Drafter(Protocol):
    """A module that drafts in a chain."""

    def unroll(
        self, embedded: Tensor, read: Tensor, places: Places, fused: Fused, count: int
    ) -> tuple[list[Tensor], Tensor]:
        """embedded [N, hidden] of the token behind each, read [N, ...] -> `count` hidden states for
        the head, the s-th teacher-forced s steps behind the target; and how unevenly each step
        uses its experts [count]."""


class Trunk(nn.Module):
    """`embed_tokens`, `layers` and `norm`, as most checkpoints call them. start: of the norm."""

    def __init__(self, c: dict[str, Any], layers: Iterable[nn.Module], start: float = 1.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(c["hidden_size"], start)


class Language(nn.Module):
    """A model whose parameter names are the checkpoint's; its head is its embedding.

    Embedding, blocks and final norm are those of `model`; a family that has them elsewhere
    overrides these. Activations are of dtype `dtype`. turned, theta: dims of a head with rotary
    positions, and their base. taps: layers whose input its drafter reads; without any it reads the
    final hidden states. made: tensors of its files that are made of its parameters.
    """

    model: Trunk
    taps: tuple[int, ...] = ()
    made: frozenset[str] = frozenset()

    def __init__(self, c: dict[str, Any], dtype: torch.dtype, turned: int, theta: float) -> None:
        super().__init__()
        self.c = c
        self.dtype = dtype
        self.turned = turned
        self.theta = theta
        self.fused = Fused()
        self.places: dict[tuple[int, int], Places] = {}

    @property
    def embedding(self) -> nn.Parameter:
        """[vocab, hidden]."""
        return self.model.embed_tokens.weight

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """Each takes x [N, hidden], Places and Fused, and gives x and how unevenly its experts are
        used."""
        return self.model.layers

    @property
    def drafter(self) -> Drafter | None:
        """The module that drafts for it, if it has one."""
        return None

    @property
    def draft_head(self) -> Tensor:
        """The head of its drafts."""
        return self.embedding

    def last(self, x: Tensor) -> Tensor:
        """The final norm."""
        found: Tensor = self.fused(rms, x, self.model.norm.weight)
        return found

    def configs(self) -> dict[str, dict[str, Any]]:
        """Folder within the checkpoint's -> its config.json. Tensors of such a folder begin with
        its name; all others are the model's own."""
        return {"": self.c}

    def begin(self) -> None:
        """Draws the weights."""
        for name, p in self.named_parameters():
            if p.dim() == 2 or "experts" in name:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[-1] ** -0.5)
            if any(part in name for part in SHRUNK):
                p.data.mul_(0.3)

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, T], T in chunks of 64 -> hidden [B * T, hidden] after the final norm, what
        drafts() reads, and how unevenly each layer uses its experts [layers]."""
        places = self._places(ids)
        uneven = []
        tapped = []
        x = self._embed(ids)
        for i, block in enumerate(self.blocks):
            if i in self.taps:
                tapped.append(x.detach())
            x, one = block(x, places, self.fused)
            uneven.append(one)
        hidden = self.last(x)
        return hidden, torch.cat(tapped, -1) if tapped else hidden, torch.stack(uneven)

    def drafts(self, ids: Tensor, read: Tensor, count: int) -> tuple[list[Tensor], Tensor]:
        """`count` hidden states [B * T, hidden], in each t predicts ids[t + 2]; and how unevenly
        each step uses the experts [count]. None where nothing drafts.

        The s-th is teacher-forced s steps behind the target: valid from t = s on.
        """
        if self.drafter is None:
            return [], read.new_zeros(0)
        embedded = self._embed(F.pad(ids[:, 1:], (0, 1)))
        return self.drafter.unroll(embedded, read, self._places(ids), self.fused, count)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return linear(hidden, self.embedding)

    def files(self) -> dict[str, dict[str, Tensor]]:
        """Folder within the checkpoint's -> its tensors."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.configs()}
        for name, tensor in self.state_dict().items():
            first, _, rest = name.partition(".")
            inner = first in found
            found[first if inner else ""][rest if inner else name] = tensor
        return found

    def load(self, folder: Path) -> None:
        """Fills it from a checkpoint as training saves it."""
        state = {}
        for name in self.configs():
            prefix = f"{name}." if name else ""
            tensors = load_file(folder / name / "model.safetensors")
            state.update({f"{prefix}{key}": tensor for key, tensor in tensors.items()})
        self.load_state_dict({n: tensor for n, tensor in state.items() if n not in self.made})

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.flatten(), self.embedding).to(self.dtype)

    def _places(self, ids: Tensor) -> Places:
        shape = (ids.shape[0], ids.shape[1])
        if shape not in self.places:
            self.places[shape] = Places(*shape, self.turned, self.theta, ids.device)
        return self.places[shape]


def one_behind(state: Tensor, places: Places) -> Tensor:
    """state [N, hidden] -> at each place that of the one before in its row, 0 at a row's first."""
    return F.pad(state[:-1], (0, 0, 1, 0)) * (places.flat > 0)[:, None]


def draft_in(e: Tensor, h: Tensor, e_norm: Tensor, h_norm: Tensor, projection: Tensor) -> Tensor:
    """What the first layer of an MTP module reads: the embedding first."""
    return linear(torch.cat([rms(e, e_norm), rms(h, h_norm)], -1), projection)


class NextToken(nn.Module, ABC):
    """An MTP module: the state of each step is its output of the step before."""

    @abstractmethod
    def forward(self, e: Tensor, h: Tensor, places: Places, fused: Fused) -> tuple[Tensor, Tensor]:
        """One step: embeddings and hidden states [N, hidden] -> hidden states, normed, and how
        unevenly its experts are used."""

    def unroll(
        self, embedded: Tensor, read: Tensor, places: Places, fused: Fused, count: int
    ) -> tuple[list[Tensor], Tensor]:
        """See Drafter. A step attends to what it made itself of the places before."""
        found = []
        uneven = []
        hidden = read
        for _ in range(count):
            hidden, one = self(embedded, hidden, places, fused)
            found.append(hidden)
            uneven.append(one)
            hidden = one_behind(hidden, places)
        return found, torch.stack(uneven)
