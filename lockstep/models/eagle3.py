"""EAGLE-3 draft head (Li et al., arXiv 2503.01840).

Its first layer reads the next token's embedding and three auxiliary hidden states of the target;
some heads have ordinary decoder layers after it. Tensor names and settings are those of the
authors' files and of SpecForge, vLLM and speculators, which call the first layer `midlayer` or
`layers.0`. A head may know only a part of the target's vocabulary: draft id i is the target's token
d2t[i] + i.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.kernels.sampling import LogitShard
from lockstep.layers.attention import Attention
from lockstep.layers.build_context import BuildContext
from lockstep.layers.latent_attention import LatentAttention
from lockstep.layers.linear import Embedding, GatheredLinear, Head, Target
from lockstep.layers.mlp import GatedMLP
from lockstep.layers.norm import AddRMSNorm, RMSNorm
from lockstep.layers.rotary import Rotary
from lockstep.layers.sharding import Columns
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config_reader import DRAFTER_REMEDY, MAX_LAYERS, ConfigReader
from lockstep.models.decoder import (
    Block,
    Decoder,
    DecoderConfig,
    Sublayer,
    mlp_sublayer,
    read_attention_layers,
    read_common,
)
from lockstep.models.json_files import read_config
from lockstep.models.latent_config import LatentConfig, read_latent_common
from lockstep.models.loader import Source, weight_specs
from lockstep.quantization import WeightSink
from lockstep.step import StepContext

LAYER = "layers.0"
EXPERTS = ".mlp.experts"
OTHER_NAMES = {
    "midlayer.": f"{LAYER}.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
"""Prefixes of tensor names in other layouts -> the prefix used here."""
THETA = 10000.0
"""Default rope_theta of a head: that of LlamaConfig, with which the authors trained."""
SWITCHES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""Settings of eagle_config that select other kinds of heads, with the supported value."""
_SPECULATORS = "notes and training settings of the speculators library"
_DENSE = "mixtures and draft modules of the target, whose config was copied; a head's MLP is dense"
_LATENT = "derived, or of no use, where one latent serves all heads; other heads read it"
_WINDOW = "use_sliding_window is off"
WITHOUT_EFFECT = {
    **dict.fromkeys(
        (
            "speculators_config", "speculators_version", "transformer_layer_config",
            "embed_requires_grad", "has_no_defaults_at_init", "ttt_steps",
            "ttt_step_loss_decay", "target_model_type", "target_model_name_or_path",
        ),
        _SPECULATORS,
    ),
    **dict.fromkeys(
        (
            "n_routed_experts", "n_shared_experts", "num_experts", "num_local_experts",
            "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq", "n_group",
            "topk_group", "norm_topk_prob", "routed_scaling_factor", "scoring_func",
            "topk_method", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step",
        ),
        _DENSE,
    ),
    **dict.fromkeys(("sliding_window", "max_window_layers"), _WINDOW),
    **dict.fromkeys(("head_dim", "qk_head_dim", "num_key_value_heads"), _LATENT),
}  # fmt: skip
"""Settings of config.json that may be ignored, each with the reason."""
OFFSETS = "d2t"
"""Tensor [draft_vocab] int64: what to add to a draft id to get the target's id."""
KNOWN = "t2d"
"""Tensor [vocab] bool: the target's tokens that the head knows."""


class HeadCheckpoint(Checkpoint):
    """Checkpoint of a head. raw: its settings, flattened if they are a speculators file's."""

    prefixes = ("model.",)

    @classmethod
    def at(cls, folder: Path) -> "HeadCheckpoint":
        """Read the checkpoint of a folder.

        Raises:
            CheckpointError: config.json is missing or unsound.
        """
        remedy = "Name the folder of an EAGLE-3 head: config.json and *.safetensors."
        raw = read_config(folder, remedy)
        layer = ConfigReader(raw).get("transformer_layer_config", dict, {})
        return cls(folder, {**layer, **raw})

    def key(self, name: str) -> str:
        """Return a tensor's name in the layout used here."""
        name = super().key(name)
        for begin, ours in OTHER_NAMES.items():
            if name.startswith(begin):
                return ours + name[len(begin) :]
        return name

    def array(self, name: str) -> Any:
        """Return a tensor as a numpy array; None where the files lack it."""
        for weight_file in self.weight_files:
            with weight_file.open() as (_, names):
                matches = [stored for stored in names if self.key(stored) == name]
            if matches:
                with safe_open(weight_file.path, framework="numpy") as file:
                    return file.get_tensor(matches[0])
        return None


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Settings of a head.

    vocab_size: the target's. draft_vocab_size: tokens that the head may propose.
    target_hidden_size: width of the target's residual. aux_hidden_layers: see Decoder. latents:
    settings of latent attention, else None. attention_bias, mlp_bias: whether these linear layers
    have biases. norm_before_residual: the residual is the normalized state, not the state.
    norm_before_fc: the auxiliary hidden states are normalized together before fc. norm_aux_hidden:
    each of them is normalized. norm_output: the head's output is normalized before the next draft
    reads it. logit_scale: factor of the logits.
    """

    layers: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_hidden_layers: tuple[int, ...]
    latents: LatentConfig | None
    attention_bias: bool
    mlp_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    norm_aux_hidden: bool
    norm_output: bool
    logit_scale: float

    @classmethod
    def read(cls, head: HeadCheckpoint, target: Decoder, layer_outputs: bool = False) -> "Config":
        """Read the settings.

        Args:
            layer_outputs: layer ids in the file name the residual after a layer, not before it.

        Raises:
            CheckpointError: a setting is missing, not supported, or does not fit the target.
        """
        c = ConfigReader(head.raw, file=str(head.folder / "config.json"))
        c.one_of("speculators_model_type", "eagle3", None, default=None)
        c.one_of("parallel_drafting", False, None, default=False)
        width = target.config.hidden_size
        vocab = target.config.vocab_size
        c.need(c.size("vocab_size") == vocab, "vocab_size", f"the target's, {vocab}")
        same = c.size("target_hidden_size", width) == width
        c.need(same, "target_hidden_size", f"the target's, {width}")
        inner = c.part("eagle_config")
        aux_layers = _aux_hidden_layers(c, inner, len(target.blocks), layer_outputs)
        count = len(aux_layers)
        same = c.size("num_aux_hidden_states", count) == count
        c.need(same, "num_aux_hidden_states", f"{count}, one for each layer id")
        known = c.size("draft_vocab_size", vocab)
        c.need(known <= vocab, "draft_vocab_size", f"1 to vocab_size, {vocab}")
        layers = read_attention_layers(c)
        # next_layer_regular is about the layers after the first.
        kinds = (True, None) if layers > 1 else (True, False, None)
        inner.one_of("next_layer_regular", *kinds, default=None)
        config = cls(
            layers=layers,
            draft_vocab_size=known,
            target_hidden_size=width,
            aux_hidden_layers=aux_layers,
            attention_bias=c.get("attention_bias", bool, False),
            mlp_bias=c.get("mlp_bias", bool, False),
            # Absent, it is True in the speculators library and False elsewhere.
            norm_before_residual=c.get(
                "norm_before_residual", bool, "speculators_model_type" in head.raw
            ),
            norm_before_fc=c.get("norm_before_fc", bool, False),
            norm_aux_hidden=c.get("fc_norm", bool, c.get("use_aux_norm", bool, False)),
            norm_output=c.get("norm_output", bool, False),
            logit_scale=c.positive("logit_scale", 1.0),
            **_read_attention(c),
        )
        inner.refuse_unread(WITHOUT_EFFECT, DRAFTER_REMEDY)
        c.refuse_unread(WITHOUT_EFFECT, DRAFTER_REMEDY)
        return config


def _read_attention(c: ConfigReader) -> dict[str, Any]:
    """Read the fields of DecoderConfig, and `latents`."""
    if c.raw.get("kv_lora_rank") is not None:
        return read_latent_common(c)
    return dict(latents=None, **read_common(c, theta=THETA))


def _aux_hidden_layers(
    c: ConfigReader, inner: ConfigReader, layers: int, layer_outputs: bool
) -> tuple[int, ...]:
    """Return Decoder.aux_hidden_layers: those that eagle_config (inner) names, or the authors'
    three.
    """
    for name, value in SWITCHES.items():
        inner.one_of(name, value, None, default=None)
    name = "eagle_aux_hidden_state_layer_ids"
    where = inner if inner.raw.get(name) else c
    named_layers = where.get(name, list, [])
    # The authors' choice of a low, a middle and a high layer.
    layer_ids = named_layers or [2, layers // 2, layers - 3]
    last = layers - 1 if layer_outputs and named_layers else layers
    allowed = f"ascending numbers of layers, 0 to {last}"
    is_list = len(layer_ids) <= MAX_LAYERS and all(type(i) is int for i in layer_ids)
    where.need(is_list, name, allowed)
    ascending = all(a < b for a, b in zip(layer_ids, layer_ids[1:], strict=False))
    where.need(ascending and layer_ids[0] >= 0 and layer_ids[-1] <= last, name, allowed)
    return tuple(i + bool(named_layers and layer_outputs) for i in layer_ids)


def draft_ids(checkpoint: HeadCheckpoint, config: Config) -> Tensor | None:
    """Return the target's token id of each of the head's [V'] int64, on the CPU; None if equal.

    Raises:
        CheckpointError: d2t and t2d are unsound or contradict each other.
    """
    count = config.draft_vocab_size
    offsets = checkpoint.array(OFFSETS)
    known = checkpoint.array(KNOWN)
    if offsets is None:
        if count == config.vocab_size:
            return None
        raise CheckpointError(
            f"{checkpoint.folder} has no tensor {OFFSETS}, which says what the {count} tokens of "
            f"its draft_vocab_size are among {config.vocab_size}. Fetch a whole head."
        )
    if offsets.shape != (count,) or offsets.dtype != "int64":
        raise CheckpointError(
            f"{checkpoint.folder}: {OFFSETS} is {offsets.dtype} {offsets.shape}; allowed: int64 "
            f"({count},), one for each token of draft_vocab_size. Fetch the head again."
        )
    ids = [index + offset for index, offset in enumerate(offsets.tolist())]
    wrong = [i for i in ids if not 0 <= i < config.vocab_size]
    if wrong or len(set(ids)) < count:
        what = f"leads to token {wrong[0]}" if wrong else "leads to a token twice"
        raise CheckpointError(
            f"{checkpoint.folder}: {OFFSETS} {what}; allowed: every token once, 0 to "
            f"{config.vocab_size - 1}. Take a head of this model."
        )
    if known is not None and known.nonzero()[0].tolist() != sorted(ids):
        raise CheckpointError(
            f"{checkpoint.folder}: {KNOWN} names other tokens than {OFFSETS}; allowed: the same. "
            "Fetch the head again."
        )
    return torch.tensor(ids)


def attention_mixer(
    build: BuildContext, c: Config, widths: tuple[int, int], rotary: Rotary
) -> Attention | LatentAttention:
    """Build the mixer of a layer. widths: of its input and its output."""
    if c.latents is not None:
        return c.latents.mixer(build, widths, rotary)
    return Attention(
        build,
        widths,
        c.heads,
        c.kv_heads,
        c.head_dim,
        rotary=rotary,
        qk_norm=bool(build.submodule_tensors("q_norm")),
        eps=c.eps,
        bias=c.attention_bias,
        out_bias=c.attention_bias,
    )


def later_layers(
    build: BuildContext, c: Config, rotary: Rotary
) -> Iterator[tuple[Sublayer, Sublayer]]:
    """Yield the sublayers of the layers after the first, which read the state alone."""
    for index in range(1, c.layers):
        layer_build = build.for_layer(build.layer, f"layers.{index}")
        mixer = attention_mixer(
            layer_build.for_submodule("self_attn"), c, (c.hidden_size, c.hidden_size), rotary
        )
        mlp = mlp_sublayer(layer_build, c, bias=c.mlp_bias)
        yield Sublayer(layer_build, c, "input_layernorm", "self_attn", mixer), mlp


class Eagle3Head(nn.Module):
    """EAGLE-3 head: h = fc(auxiliary hidden states), a layer over [norm(embedding), norm(h)], more
    layers, a head.

    checkpoint: the head's; its files are not read if the build has no tensors (dummy weights).
    """

    def __init__(
        self, target: Decoder, build: BuildContext, c: Config, checkpoint: HeadCheckpoint
    ) -> None:
        super().__init__()
        self.config = c
        self.checkpoint = checkpoint
        self.aux_hidden_layers = c.aux_hidden_layers
        self.order: Tensor | None = None
        if any(EXPERTS in name for name in build.tensors or {}):
            raise CheckpointError(
                f"{checkpoint.folder} has a mixture of experts (mlp.experts), which is not built "
                "for a head; allowed: one MLP. Take a head with a dense MLP."
            )
        self.ids = self._known(build, c)
        self.embed = target.embed
        fits = c.hidden_size == c.target_hidden_size
        self.own_embed = not fits if build.tensors is None else "embed_tokens" in build.tensors
        if self.own_embed:
            self.embed = Embedding(build, c.vocab_size, c.hidden_size)
        elif not fits:
            raise CheckpointError(
                f"{checkpoint.folder} has no embed_tokens.weight, and its hidden_size "
                f"{c.hidden_size} is not the target's, {c.target_hidden_size}, whose embedding it "
                "would read. Fetch a whole head."
            )
        top = build.for_layer(build.layer, "")
        width = len(c.aux_hidden_layers) * c.target_hidden_size
        self.before_fc = RMSNorm(build, width, c.eps) if c.norm_before_fc else None
        self.aux_norms = nn.ModuleList(
            RMSNorm(build, c.target_hidden_size, c.eps)
            for _ in c.aux_hidden_layers
            if c.norm_aux_hidden
        )
        self.fc = (
            GatheredLinear(top, width, {"fc": Columns.of(c.hidden_size)})
            if width != c.hidden_size
            else None
        )
        layer_build = build.for_layer(build.layer, LAYER)
        rotary = c.rope.rotary(build)
        self.embed_norm = RMSNorm(build, c.hidden_size, c.eps)
        self.hidden_norm = RMSNorm(build, c.hidden_size, c.eps)
        mixes = (2 * c.hidden_size, c.hidden_size)
        self.attention = attention_mixer(layer_build.for_submodule("self_attn"), c, mixes, rotary)
        self.mlp_norm = AddRMSNorm(build, c.hidden_size, c.eps)
        sizes = (c.hidden_size, c.intermediate_size)
        self.mlp = GatedMLP(layer_build.for_submodule("mlp"), *sizes, bias=c.mlp_bias)
        self.blocks = nn.ModuleList(
            Block(*sublayers) for sublayers in later_layers(build, c, rotary)
        )
        self.norm = AddRMSNorm(build, c.hidden_size, c.eps)
        full_vocabulary = fits and c.draft_vocab_size == c.vocab_size
        self.own_head = not full_vocabulary or build.tensors is None or "lm_head" in build.tensors
        if c.tied and not self.own_head:
            raise CheckpointError(
                f"{checkpoint.folder} has no lm_head.weight, and its config.json has "
                "tie_word_embeddings=True; allowed: False there, for the target's head. "
                "Correct config.json, or fetch a whole head."
            )
        existing = None if self.own_head else target.head
        self.head = Head(top, c.draft_vocab_size, c.hidden_size, existing)

    def _known(self, build: BuildContext, c: Config) -> Tensor | None:
        """Return the target's tokens that the head knows, ascending; `order` is their order in its
        file.
        """
        if build.tensors is None:
            count = c.draft_vocab_size
            return None if count == c.vocab_size else torch.arange(count, device=build.device)
        target_ids = draft_ids(self.checkpoint, c)
        if target_ids is None:
            return None
        ids, self.order = target_ids.sort()
        return ids.to(build.device)

    @property
    def logit_shard(self) -> LogitShard:
        """Share of the logits that this rank returns."""
        return self.head.logit_shard

    @property
    def head_bytes(self) -> int:
        """Bytes of an own head; 0 if it shares the target's."""
        return self.head.stored.nbytes if self.own_head else 0

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the first state [T, H'] from the auxiliary hidden states [T, H]."""
        hidden_states = list(aux_hidden_states)
        if self.aux_norms:
            pairs = zip(self.aux_norms, hidden_states, strict=True)
            hidden_states = [norm(hidden_state) for norm, hidden_state in pairs]
        state = torch.cat(hidden_states, dim=-1)
        if self.before_fc is not None:
            state = self.before_fc(state)
        return state if self.fc is None else self.fc(state, None)

    def forward(self, ids: Tensor, state: Tensor, ctx: StepContext) -> Tensor:
        """Return the next state [T, H'] of ids [T] and state [T, H']."""
        residual, mixed = self._mixed(ids, state)
        x, normed = self.mlp_norm(residual, self.attention(mixed, ctx))
        delta = self.mlp(normed, ctx)
        for block in self.blocks:
            x, delta, _ = block(x, delta, ctx)
        residual_out, out = self.norm(x, delta)
        return out if self.config.norm_output else residual_out

    def logits(self, state: Tensor) -> Tensor:
        """Return this rank's logits [S, n] over `ids` of state [S, H']."""
        if not self.config.norm_output:
            state = self.norm(state, None)[1]
        logits = self.head(state)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def write_cache(self, ids: Tensor, state: Tensor, ctx: StepContext) -> None:
        """Write the keys and values of these tokens, and no output if there is a single layer."""
        if self.blocks:
            self(ids, state, ctx)
        else:
            self.attention.write_cache(self._mixed(ids, state)[1], ctx)

    def _mixed(self, ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual [T, H'] and the attention's input [T, 2 H'], the embedding first."""
        hidden = self.hidden_norm(state)
        residual = hidden if self.config.norm_before_residual else state
        return residual, torch.cat([self.embed_norm(self.embed(ids)), hidden], dim=-1)

    def finish(self) -> None:
        """Do nothing: the target finishes the layers that it shares."""

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name, to their destinations."""
        table: dict[str, Target] = {
            f"{LAYER}.input_layernorm.weight": self.embed_norm.weight,
            f"{LAYER}.hidden_norm.weight": self.hidden_norm.weight,
            f"{LAYER}.post_attention_layernorm.weight": self.mlp_norm.weight,
            "norm.weight": self.norm.weight,
        }
        for part, name in ((self.attention, "self_attn"), (self.mlp, "mlp")):
            table |= {f"{LAYER}.{name}.{inner}": slot for inner, slot in part.weights().items()}
        for index, block in enumerate(self.blocks, 1):
            table |= {f"layers.{index}.{n}": slot for n, slot in block.weights().items()}
        for index, norm in enumerate(self.aux_norms):
            table[f"fc_norm.{index}.weight"] = norm.weight
        if self.before_fc is not None:
            table["input_norm.weight"] = self.before_fc.weight
        if self.fc is not None:
            table |= self.fc.weights()
        if self.own_embed:
            table |= self.embed.weights()
        table |= {name: self._ordered(slot) for name, slot in self.head.weights().items()}
        return table

    def _ordered(self, target: Target) -> Target:
        """Return the destination of the head's rows in the order of `ids`.

        Raises:
            CheckpointError: the rows are quantized and in another order.
        """
        order = self.order
        if order is None or bool((order[1:] > order[:-1]).all()):
            return target
        weight = self.head.weight
        if weight is None:
            raise CheckpointError(
                f"{self.checkpoint.folder}: lm_head is quantized, and {OFFSETS} does not ascend; "
                "allowed: one of the two. Use a head whose lm_head is not quantized."
            )
        shard = self.logit_shard
        rows = partial(_rows, order=order[shard.begin : shard.begin + shard.width])
        # The rank's rows may be anywhere in the file, so it reads all of them.
        all_rows = ((0, shard.total),)
        return WeightSink.copy_into(weight, rows, ranges=all_rows, total_rows=shard.total)

    def source(self) -> Source:
        """Return the tensors of the head's checkpoint; d2t and t2d are read at build time."""
        wanted = weight_specs(self.weights())
        return Source(self.checkpoint, wanted, lambda name: self.checkpoint.key(name) in READ)


READ = frozenset((OFFSETS, KNOWN))
"""Tensors that are read before the others."""


def _rows(tensor: Tensor, order: Tensor) -> Tensor:
    return tensor[order.to(tensor.device)]
