"""What the decoders here have in common: settings, sublayers, blocks, stack and head.

A model file declares each layer's sublayers: a norm and a body each, which is a mixer or an MLP.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lockstep.cache.specs import is_cached
from lockstep.layers.attention import Attention
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Embedding, Head, Target
from lockstep.layers.mlp import GatedMLP
from lockstep.layers.norm import AddRMSNorm
from lockstep.models.config_reader import MAX_LAYERS, ConfigReader
from lockstep.models.rope import Rope, read_rope
from lockstep.step import Step


@dataclass(frozen=True)
class StackConfig:
    """The settings that every decoder has. norm_offset: 1 where norms are stored around zero;
    intermediate_size: of dense MLPs, 0 where there are none."""

    norm_offset: ClassVar[float] = 0.0

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool


@dataclass(frozen=True)
class DecoderConfig(StackConfig):
    """Those of one whose attention knows positions."""

    rope: Rope


def read_common(
    c: ConfigReader,
    head_dim: int | None = None,
    partial: float = 1.0,
    dense: bool = True,
    theta: float | None = None,
) -> dict[str, Any]:
    """The fields of DecoderConfig from config.json.

    head_dim, or hidden_size / heads where it is None, partial, the share of a head that turns, and
    theta of rotary positions, unless it is None, count where the file does not say. dense: whether
    there are dense MLPs.
    """
    c.only("hidden_act", "silu", default="silu")
    hidden_size = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads")
    c.need(heads % kv_heads == 0, "num_attention_heads", "multiples of num_key_value_heads")
    if head_dim is None and c.raw.get("head_dim") is None:
        c.need(hidden_size % heads == 0, "hidden_size", "multiples of num_attention_heads")
        head_dim = hidden_size // heads
    head_dim = c.size("head_dim", head_dim)
    told = dense or c.raw.get("intermediate_size") is not None
    return dict(
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=c.size("intermediate_size") if told else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=c.positive("rms_norm_eps"),
        rope=read_rope(c, head_dim, partial, theta),
        tied=c.get("tie_word_embeddings", bool, False),
    )


def read_attention_layers(c: ConfigReader) -> int:
    """How many layers there are; each attends to all tokens, since windows are not built."""
    c.only("use_sliding_window", False, default=False)
    layers = c.size("num_hidden_layers", most=MAX_LAYERS)
    c.layer_types(layers, {"full_attention"}, ["full_attention"] * layers)
    return layers


class Sublayer:
    """x += body(norm x): what a layer is made of. An ordinary layer has two, mixer and MLP.

    norm_name and name: what the checkpoint calls norm and body within the layer. A body that keeps
    something between steps, and says so by cache_spec(), is a mixer: body(x, step). Any other sees
    one token at a time: body(x). Both take and give [T, H], and own their weights().
    """

    def __init__(
        self, build: BuildContext, c: StackConfig, norm_name: str, name: str, body: nn.Module
    ) -> None:
        self.norm_name = norm_name
        self.norm = AddRMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.name = name
        self.body: Any = body
        self.mixes = is_cached(body)

    def weights(self) -> dict[str, Target]:
        """Checkpoint name within the layer -> what it fills."""
        own = {f"{self.name}.{name}": tensor for name, tensor in self.body.weights().items()}
        return {f"{self.norm_name}.weight": self.norm.weight} | own


class Block(nn.Module):
    """A decoder layer: its sublayers, applied one after the other.

    Norms and bodies are registered as submodules under the checkpoint's names. A sublayer returns
    the residual x and a delta that is not added yet: the next norm adds and normalizes in one op.
    """

    def __init__(self, *sublayers: Sublayer) -> None:
        super().__init__()
        self.sublayers = sublayers
        for half in sublayers:
            self.add_module(half.norm_name, half.norm)
            self.add_module(half.name, half.body)

    def forward(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """x, delta [T, H] (None before the first block) -> the same of the next block, and the
        residual [T, H] as the first half norms it: what all layers before this one have left."""
        out = delta
        entered = x
        for index, half in enumerate(self.sublayers):
            x, out = self.tokenwise(x, out, index)
            if index == 0:
                entered = x
            if half.mixes:
                out = half.body(out, step)
        assert out is not None, "a layer has one half or more"
        return x, out, entered

    def tokenwise(self, x: Tensor, delta: Tensor | None, index: int) -> tuple[Tensor, Tensor]:
        """The part of a half in which no token sees another: the norm, and a body that is no mixer.

        x, delta [T, H] -> the residual, and the mixer's input or the body's output, each [T, H].
        It is what graphs hold where the mixers stay outside of them (runner/capture.py).
        """
        half = self.sublayers[index]
        x, normed = half.norm(x, delta)
        return x, normed if half.mixes else half.body(normed)

    def weights(self) -> dict[str, Target]:
        """Checkpoint name within the layer -> what it fills."""
        return {name: tensor for half in self.sublayers for name, tensor in half.weights().items()}


def mlp_sublayer(build: BuildContext, c: DecoderConfig, *, bias: bool = False) -> Sublayer:
    """The gated MLP, under the names that most checkpoints give it."""
    mlp = GatedMLP(build.within("mlp"), c.hidden_size, c.intermediate_size, bias=bias)
    return Sublayer(build, c, "post_attention_layernorm", "mlp", mlp)


def attention_layers(
    build: BuildContext,
    c: DecoderConfig,
    count: int,
    mlp: Callable[[BuildContext, int], Sublayer],
    **attention: Any,
) -> Iterator[tuple[Sublayer, Sublayer]]:
    """`count` layers of attention, under the names that most checkpoints give it, and then what
    mlp(build, layer) makes. attention: the options of lockstep.layers.attention.Attention, less
    rotary."""
    rotary = c.rope.rotary(build)
    for i in range(count):
        at = build.at(f"layers.{i}")
        sizes = (c.hidden_size, c.heads, c.kv_heads, c.head_dim)
        mixer = Attention(at.within("self_attn"), *sizes, rotary=rotary, **attention)
        yield Sublayer(at, c, "input_layernorm", "self_attn", mixer), mlp(at, i)


class Decoder(nn.Module, ABC):
    """The target: embedding, the layers that its file declares, final norm, head.

    embed_name, norm_name: what the checkpoint calls the embedding and the final norm.
    snapshot_every: pages of a prompt between two snapshots of its state, unless the user says.
    taps: the places whose residual a drafter reads: i is in front of layer i, and the number of
    layers is behind the last one.
    """

    snapshot_every: ClassVar[int] = 1
    embed_name: ClassVar[str] = "embed_tokens"
    norm_name: ClassVar[str] = "norm"

    def __init__(self, config: StackConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.taps: tuple[int, ...] = ()
        c = config
        build.kv = build.kv.settled(self.attending())
        self.embed = Embedding(build, c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(*sublayers) for sublayers in self.layers(build))
        self.norm = AddRMSNorm(build.at("norm"), c.hidden_size, c.eps, c.norm_offset)
        tied = self.embed.weight if c.tied else None
        self.head = Head(build.at("head", path=""), c.vocab_size, c.hidden_size, tied)

    def attending(self) -> Sequence[int]:
        """The numbers of the layers that attend: all, unless its file says otherwise."""
        return range(self.config.layers)  # type: ignore[attr-defined]  # a file's own setting

    @abstractmethod
    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """The sublayers of each layer, the first layer first."""

    def forward(self, step: Step) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> hidden [T, H] after the final norm, aux_hidden_states: the residual [T, H] at every
        tap."""
        x = self.embed(step.token_ids)
        delta = None
        tapped = []
        for place, block in enumerate(self.blocks):
            x, delta, entered = block(x, delta, step)
            if place in self.taps:
                tapped.append(entered)
        left, hidden = self.norm(x, delta)
        if len(self.blocks) in self.taps:
            tapped.append(left)
        return hidden, tuple(tapped)

    def logits(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, H] -> [N, V] at the step's logit rows."""
        return self.head(hidden[step.logit_rows])

    def weights(self) -> dict[str, Target]:
        """Checkpoint name, less its prefix -> what it fills."""
        table: dict[str, Target] = {
            f"{self.embed_name}.weight": self.embed.weight,
            f"{self.norm_name}.weight": self.norm.weight,
        }
        if not self.config.tied:
            table |= self.head.weights()
        for i, block in enumerate(self.blocks):
            table.update({f"layers.{i}.{name}": t for name, t in block.weights().items()})
        return table
