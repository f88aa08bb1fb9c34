"""Common parts of decoders: settings, sublayers, blocks, the layer stack and the head.

A model file declares the sublayers of each layer: a norm, and a mixer or MLP as the body.
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
from lockstep.step import ForwardContext

UNUSED_WINDOW = dict.fromkeys(("sliding_window", "max_window_layers"), "use_sliding_window is off")
"""Settings that may be ignored after read_attention_layers(), each with the reason."""


@dataclass(frozen=True)
class StackConfig:
    """Settings of every decoder.

    norm_offset: 1 if norms are stored around zero. intermediate_size: width of dense MLPs, 0 for
    none.
    """

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
    """Settings of a decoder with rotary positions."""

    rope: Rope


def read_common(
    c: ConfigReader,
    head_dim: int | None = None,
    partial: float = 1.0,
    dense: bool = True,
    theta: float | None = None,
) -> dict[str, Any]:
    """Read the fields of DecoderConfig from config.json.

    Args:
        head_dim: default; None for hidden_size / heads.
        partial: default share of a head's dims that have rotary positions.
        dense: whether there are dense MLPs.
        theta: default of rope_theta; None if the file must have it.
    """
    c.one_of("hidden_act", "silu", default="silu")
    hidden_size = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads")
    c.need(heads % kv_heads == 0, "num_attention_heads", "multiples of num_key_value_heads")
    if head_dim is None and c.raw.get("head_dim") is None:
        c.need(hidden_size % heads == 0, "hidden_size", "multiples of num_attention_heads")
        head_dim = hidden_size // heads
    head_dim = c.size("head_dim", head_dim)
    has_width = dense or c.raw.get("intermediate_size") is not None
    return dict(
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=c.size("intermediate_size") if has_width else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=c.positive("rms_norm_eps"),
        rope=read_rope(c, head_dim, partial, theta),
        tied=c.get("tie_word_embeddings", bool, False),
    )


def read_attention_layers(c: ConfigReader) -> int:
    """Return the number of layers; each has full attention, since windows are not supported."""
    c.one_of("use_sliding_window", False, default=False)
    layers = c.size("num_hidden_layers", max_value=MAX_LAYERS)
    c.layer_types(layers, {"full_attention"}, ["full_attention"] * layers)
    return layers


class Sublayer:
    """Part of a layer: x += body(norm(x), ctx). Most layers have two, a mixer and an MLP.

    norm_name, name: names of norm and body in the checkpoint, within the layer. body: [T, H] ->
    delta [T, H]. A body with a cache_spec() is a mixer: it reads other tokens of its row. Any other
    body computes every token independently, and reads only the token inputs of ctx. A body whose
    input is read by one linear layer alone has it as first_linear; the norm may quantize for it.
    """

    def __init__(
        self, build: BuildContext, c: StackConfig, norm_name: str, name: str, body: nn.Module
    ) -> None:
        self.norm_name = norm_name
        reader = getattr(body, "first_linear", None)
        self.norm = AddRMSNorm(build, c.hidden_size, c.eps, c.norm_offset, reader)
        self.name = name
        self.body: Any = body
        self.mixes = is_cached(body)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        body_weights = {
            f"{self.name}.{name}": tensor for name, tensor in self.body.weights().items()
        }
        return {f"{self.norm_name}.weight": self.norm.weight} | body_weights


class Block(nn.Module):
    """A decoder layer: its sublayers, applied one after the other.

    Norms and bodies are registered as submodules under the checkpoint's names. A sublayer returns
    the residual x and a delta that is not added yet: the next norm adds and normalizes in one op.
    """

    def __init__(self, *sublayers: Sublayer) -> None:
        super().__init__()
        self.sublayers = sublayers
        for sublayer in sublayers:
            self.add_module(sublayer.norm_name, sublayer.norm)
            self.add_module(sublayer.name, sublayer.body)

    def forward(
        self, x: Tensor, delta: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the layer.

        Args:
            x: residual [T, H].
            delta: [T, H], not added to the residual yet; None before the first layer.

        Returns:
            (residual, delta, residual input): the residual input [T, H] is the residual that the
            layer's first norm reads, which drafters take as an auxiliary hidden state.
        """
        out = delta
        residual_input = x
        for index, sublayer in enumerate(self.sublayers):
            x, out = self.tokenwise(x, out, index, ctx)
            if index == 0:
                residual_input = x
            if sublayer.mixes:
                out = sublayer.body(out, ctx)
        assert out is not None, "a layer has at least one sublayer"
        return x, out, residual_input

    def tokenwise(
        self, x: Tensor, delta: Tensor | None, index: int, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Apply the part of a sublayer in which no token reads another one.

        It is the norm, and the body unless it is a mixer. Piecewise CUDA graphs capture it.

        Returns:
            (residual, the mixer's input or the body's delta), each [T, H].
        """
        sublayer = self.sublayers[index]
        x, normed = sublayer.norm(x, delta)
        return x, normed if sublayer.mixes else sublayer.body(normed, ctx)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        return {
            name: tensor
            for sublayer in self.sublayers
            for name, tensor in sublayer.weights().items()
        }


def mlp_sublayer(build: BuildContext, c: DecoderConfig, *, bias: bool = False) -> Sublayer:
    """Build the gated MLP under its usual checkpoint names."""
    mlp = GatedMLP(build.for_submodule("mlp"), c.hidden_size, c.intermediate_size, bias=bias)
    return Sublayer(build, c, "post_attention_layernorm", "mlp", mlp)


def attention_layers(
    build: BuildContext,
    c: DecoderConfig,
    count: int,
    mlp: Callable[[BuildContext, int], Sublayer],
    **attention: Any,
) -> Iterator[tuple[Sublayer, Sublayer]]:
    """Yield `count` layers: attention under its usual checkpoint names, then mlp(build, layer).

    attention: options of lockstep.layers.attention.Attention, except rotary.
    """
    rotary = c.rope.rotary(build)
    for i in range(count):
        layer_build = build.for_layer(f"layers.{i}")
        sizes = (c.hidden_size, c.heads, c.kv_heads, c.head_dim)
        mixer = Attention(
            layer_build.for_submodule("self_attn"), *sizes, rotary=rotary, **attention
        )
        yield Sublayer(layer_build, c, "input_layernorm", "self_attn", mixer), mlp(layer_build, i)


class Decoder(nn.Module, ABC):
    """Target model: embedding, layers, final norm and head.

    embed_name, norm_name: checkpoint names of the embedding and the final norm. snapshot_every:
    default number of prompt pages between two snapshots of recurrent state.
    aux_hidden_layers: auxiliary hidden states for a drafter, ascending: i is the residual before
    layer i, and the number of layers is the residual after the last one.
    """

    snapshot_every: ClassVar[int] = 1
    embed_name: ClassVar[str] = "embed_tokens"
    norm_name: ClassVar[str] = "norm"

    def __init__(self, config: StackConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.aux_hidden_layers: tuple[int, ...] = ()
        c = config
        # Before any layer is built: KV formats by layer refer to the numbers of attention layers.
        build.kv = build.kv.resolved(self.attention_layers())
        sizes = (c.vocab_size, c.hidden_size)
        self.embed = Embedding(build.for_layer("embed"), *sizes, self.embed_name)
        self.blocks = nn.ModuleList(Block(*sublayers) for sublayers in self.layers(build))
        self.norm = AddRMSNorm(build.for_layer("norm"), c.hidden_size, c.eps, c.norm_offset)
        tied = self.embed if c.tied else None
        self.head = Head(build.for_layer("head", path=""), *sizes, embedding=tied)

    def attention_layers(self) -> Sequence[int]:
        """Return the numbers of the attention layers: all, unless the architecture overrides it."""
        return range(self.config.layers)  # type: ignore[attr-defined]  # a file's own setting

    @abstractmethod
    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield the sublayers of each layer, in order."""

    def forward(self, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return hidden states [T, H] after the final norm, and the auxiliary ones, each [T, H]."""
        x = self.embed(ctx.token_ids)
        delta = None
        aux_hidden_states = []
        for index, block in enumerate(self.blocks):
            x, delta, residual_input = block(x, delta, ctx)
            if index in self.aux_hidden_layers:
                aux_hidden_states.append(residual_input)
        residual, hidden = self.norm(x, delta)
        if len(self.blocks) in self.aux_hidden_layers:
            aux_hidden_states.append(residual)
        return hidden, tuple(aux_hidden_states)

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return this rank's logits [N, n] at the logit rows of hidden [T, H]."""
        return self.head(ctx.at_logit_rows(hidden))

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name less the prefix, to their destinations."""
        table = self.embed.weights()
        table[f"{self.norm_name}.weight"] = self.norm.weight
        # Last: a tied head may take the embedding's tensor.
        table |= self.head.weights()
        for i, block in enumerate(self.blocks):
            table.update({f"layers.{i}.{name}": t for name, t in block.weights().items()})
        return table
