"""Nemotron-H and Nemotron 3: every block has one sublayer: Mamba-2, attention, MLP or mixture.

Attention has no positional encoding; the Mamba-2 blocks give the order. The MTP module of Nemotron
3 Super is an attention block followed by MLP or mixture blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from torch import Tensor, nn

from lockstep.layers.attention import Attention
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Target
from lockstep.layers.mamba2 import Mamba2
from lockstep.layers.mlp import ReluMLP
from lockstep.layers.moe import RELU_MLP, MoE, Routing
from lockstep.models.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from lockstep.models.decoder import Decoder, StackConfig, Sublayer
from lockstep.models.mtp_module import MTPModule

PREFIXES = ("backbone.", "model.")
IGNORED = ()
DRAFT_PREFIX = "mtp."
DRAFT_SETTING = "num_nextn_predict_layers"
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letter of hybrid_override_pattern -> block type in layers_block_type."""
LATER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""Block types of transformers 5 -> those of layers_block_type."""

DRAFT_KINDS = ("attention", "moe")
"""Blocks of an MTP module without a pattern in config.json, as in transformers."""

SNAPSHOT_EVERY = 256
"""Pages of a prompt between two snapshots: 16,384 tokens. A snapshot is as large as the KV cache of
7,989 tokens (Nano), 8,762 (Nano 9B) or 20,780 (Super). Measured by benchmarks/snapshots.py:
docs/cache.md."""
MAMBA_SETTINGS = (
    "mamba_hidden_act",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_bias",
    "use_conv_bias",
    "time_step_limit",
)
EXPERT_SETTINGS = (
    "n_shared_experts",
    "n_routed_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
)
WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        "attention has no positional encoding",
    ),
    **dict.fromkeys(
        ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
        "initial values of training",
    ),
    **dict.fromkeys(
        ("expand", "mamba_expand", "head_dim", "attention_head_dim"), "other settings give the size"
    ),
    "time_step_rank": "of Mamba-1, which projects its time steps",
    **dict.fromkeys(
        ("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "moe_shared_expert_overlap"),
        "how transformers computes the same",
    ),
    **dict.fromkeys(
        ("mtp_hybrid_override_pattern", "mtp_layers_block_type"), "there is no MTP module"
    ),
}
"""Settings of config.json that may be ignored, each with the reason."""
EPS_NAMES = ("layer_norm_epsilon", "norm_eps", "rms_norm_eps")
OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
"""Older names of Mamba-2 settings, which transformers still reads -> present names."""


@dataclass(frozen=True)
class Mamba:
    """Settings of Mamba-2 blocks: see lockstep.layers.mamba2."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    bias: bool
    conv_bias: bool
    limits: tuple[float, float]


@dataclass(frozen=True)
class Experts:
    """Settings of mixtures: see lockstep.layers.moe."""

    routing: Routing
    inner: int
    shared_inner: int
    latent: int


@dataclass(frozen=True)
class Config(StackConfig):
    """Settings of config.json.

    kinds: block types, values of KINDS. draft_kinds: those of the MTP module, empty without one.
    mamba, experts: None if no block is one.
    """

    kinds: tuple[str, ...]
    draft_kinds: tuple[str, ...]
    mlp_bias: bool
    mamba: Mamba | None
    experts: Experts | None

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = _with_later_names(ConfigReader(raw))
        kinds = _read_kinds(c)
        draft_kinds = _read_draft_kinds(c)
        all_kinds = (*kinds, *draft_kinds)
        c.one_of("mlp_hidden_act", "relu2", default="relu2")
        c.one_of("residual_in_fp32", False, default=False)
        c.one_of("attention_bias", False, default=False)
        c.one_of("sliding_window", None, default=None)
        heads = c.size("num_attention_heads")
        kv_heads = c.size("num_key_value_heads")
        c.need(heads % kv_heads == 0, "num_attention_heads", "multiples of num_key_value_heads")
        eps = next((name for name in EPS_NAMES if name in c.raw), EPS_NAMES[0])
        # A file may repeat the epsilon under several names, which must agree.
        for name in EPS_NAMES:
            c.need(c.raw.get(name, c.raw.get(eps)) == c.raw.get(eps), name, f"{eps}'s value")
        config = cls(
            vocab_size=c.size("vocab_size"),
            hidden_size=c.size("hidden_size"),
            intermediate_size=c.size("intermediate_size") if "mlp" in all_kinds else 0,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=c.size("head_dim" if "head_dim" in c.raw else "attention_head_dim"),
            eps=c.positive(eps),
            tied=c.get("tie_word_embeddings", bool, False),
            kinds=kinds,
            draft_kinds=draft_kinds,
            mlp_bias=c.get("mlp_bias", bool, False),
            mamba=_read_mamba(c) if "mamba" in kinds else None,
            experts=_read_experts(c) if "moe" in all_kinds else None,
        )
        c.refuse_unread(_without_effect(all_kinds))
        return config


def _without_effect(kinds: tuple[str, ...]) -> dict[str, str]:
    """Return the settings that may be ignored where the blocks are of these kinds -> why."""
    absent = {"mamba": MAMBA_SETTINGS, "moe": EXPERT_SETTINGS, "mlp": ("intermediate_size",)}
    reasons = dict(WITHOUT_EFFECT)
    for kind, names in absent.items():
        if kind not in kinds:
            reasons |= dict.fromkeys(names, f"no block of {kind}")
    return reasons


def _with_later_names(c: ConfigReader) -> ConfigReader:
    """Return the settings under their present names.

    Raises:
        CheckpointError: a setting has different values under two names.
    """
    later = {name: value for name, value in c.raw.items() if name not in OLDER_NAMES}
    for older, name in OLDER_NAMES.items():
        if older not in c.raw:
            continue
        same = name not in later or later[name] == c.raw[older]
        c.need(same, older, f"{later.get(name)!r}, as {name} has it")
        later[name] = c.raw[older]
    return ConfigReader(later)


def _read_kinds(c: ConfigReader) -> tuple[str, ...]:
    """Return the type of each block: hybrid_override_pattern, layers_block_type or layer_types."""
    names = ("hybrid_override_pattern", "layers_block_type", "layer_types")
    field, kinds = _agreed_kinds(c, names)
    c.need("attention" in kinds, field, "patterns with a block of attention")
    layers = c.get("num_hidden_layers", int, len(kinds))
    c.need(layers == len(kinds), "num_hidden_layers", f"{len(kinds)}, the blocks of {field}")
    return kinds


def _read_draft_kinds(c: ConfigReader) -> tuple[str, ...]:
    """Return the block types of the MTP module."""
    if not c.one_of(DRAFT_SETTING, 0, 1, None, default=0):
        return ()
    names = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if all(c.raw.get(name) is None for name in names):
        return DRAFT_KINDS
    field, kinds = _agreed_kinds(c, names)
    is_valid = kinds[0] == "attention" and not {"attention", "mamba"} & set(kinds[1:])
    c.need(is_valid, field, "attention first, then blocks of mlp or moe alone")
    return kinds


def _agreed_kinds(c: ConfigReader, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the first present setting's name and its block types.

    Raises:
        CheckpointError: another setting names other types.
    """
    first, *aliases = [name for name in names if c.raw.get(name) is not None] or names[:1]
    kinds = _kinds_of(c, first)
    for alias in aliases:
        c.need(_kinds_of(c, alias) == kinds, alias, f"the blocks of {first}")
    return first, kinds


def _kinds_of(c: ConfigReader, field: str) -> tuple[str, ...]:
    """Return the block types that a setting names, by letters or as a list."""
    by_letters = field.endswith("pattern")
    entries: list[Any] = list(c.get(field, str if by_letters else list))
    if by_letters:
        known = set(KINDS)
        kinds = [KINDS.get(letter, "") for letter in entries]
    else:
        known = {*KINDS.values(), *LATER_NAMES}
        kinds = [LATER_NAMES.get(name, name) if isinstance(name, str) else "" for name in entries]
    for name, kind in zip(entries, kinds, strict=True):
        if kind not in KINDS.values():
            raise c.error(field, name, ", ".join(sorted(known)))
    c.need(0 < len(kinds) <= MAX_LAYERS, field, f"1 to {MAX_LAYERS} blocks")
    return tuple(kinds)


def _read_mamba(c: ConfigReader) -> Mamba:
    c.one_of("mamba_hidden_act", "silu", default="silu")
    c.one_of("mamba_proj_bias", False, default=False)
    c.one_of("mamba_ssm_cache_dtype", "float32", default="float32")
    heads = c.size("mamba_num_heads")
    groups = c.size("n_groups")
    c.need(heads % groups == 0, "mamba_num_heads", "multiples of n_groups")
    return Mamba(
        heads=heads,
        head_dim=c.size("mamba_head_dim"),
        groups=groups,
        state_dim=c.size("ssm_state_size"),
        kernel=c.size("conv_kernel"),
        bias=c.get("use_bias", bool, False),
        conv_bias=c.get("use_conv_bias", bool, True),
        limits=_read_limits(c),
    )


def _read_limits(c: ConfigReader) -> tuple[float, float]:
    """Read time_step_limit; transformers 5 writes infinity as {"__float__": "Infinity"}."""
    limits = [
        inf if limit == {"__float__": "Infinity"} else limit
        for limit in c.get("time_step_limit", list, [0.0, inf])
    ]
    are_numbers = all(type(limit) in (int, float) for limit in limits)
    is_valid = len(limits) == 2 and are_numbers and 0 <= limits[0] <= limits[1]
    c.need(is_valid, "time_step_limit", "two numbers, ascending from 0")
    return float(limits[0]), float(limits[1])


def _read_experts(c: ConfigReader) -> Experts:
    c.one_of("n_shared_experts", 1, default=1)
    local = "n_routed_experts" if "n_routed_experts" in c.raw else "num_local_experts"
    routing = Routing(
        c.size(local, max_value=MAX_EXPERTS),
        c.size("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=c.get("norm_topk_prob", bool),
        scale=c.positive("routed_scaling_factor"),
        bias=True,
        groups=c.size("n_group", 1),
        top_groups=c.size("topk_group", 1),
    )
    return Experts(
        routing=routing,
        inner=c.size("moe_intermediate_size"),
        shared_inner=c.size("moe_shared_expert_intermediate_size"),
        latent=c.size("moe_latent_size") if c.raw.get("moe_latent_size") is not None else 0,
    )


class Model(Decoder):
    """NemotronHForCausalLM."""

    config: Config
    embed_name: ClassVar[str] = "embeddings"
    norm_name: ClassVar[str] = "norm_f"
    snapshot_every: ClassVar[int] = SNAPSHOT_EVERY

    def attention_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.config.kinds) if kind == "attention"]

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield one sublayer per block; the checkpoint calls each `mixer`."""
        for i, kind in enumerate(self.config.kinds):
            yield (self.single_sublayer(build.for_layer(f"layers.{i}"), kind),)

    def single_sublayer(self, build: BuildContext, kind: str) -> Sublayer:
        """Build the sublayer of a block."""
        return Sublayer(
            build, self.config, "norm", "mixer", self.body(build.for_submodule("mixer"), kind)
        )

    def body(self, build: BuildContext, kind: str) -> nn.Module:
        """Build the body of a block of this type."""
        c = self.config
        if kind == "attention":
            sizes = (c.hidden_size, c.heads, c.kv_heads, c.head_dim)
            return Attention(build, *sizes, rotary=None)
        if kind == "mlp":
            return ReluMLP(build, c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        if kind == "moe" and c.experts is not None:
            e = c.experts
            return MoE(
                build,
                c.hidden_size,
                e.inner,
                e.routing,
                act="relu2",
                names=RELU_MLP,
                shared_inner=e.shared_inner,
                shared_name="shared_experts",
                latent=e.latent,
                bias=c.mlp_bias,
            )
        m = c.mamba
        assert m is not None, "there are blocks of Mamba-2"
        return Mamba2(
            build,
            c.hidden_size,
            m.heads,
            m.head_dim,
            m.groups,
            m.state_dim,
            m.kernel,
            c.eps,
            bias=m.bias,
            conv_bias=m.conv_bias,
            limits=m.limits,
        )


class Draft(MTPModule):
    """MTP module: eh_proj([enorm(embedding), hnorm(hidden)]), its blocks, final_layernorm."""

    def __init__(self, target: Model, build: BuildContext, ids: Tensor | None = None) -> None:
        super().__init__(target, build, ids, module="mtp.layers.0", projection="eh_proj")

    def layers(self, target: Any, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield one sublayer per block, as in the target."""
        for i, kind in enumerate(target.config.draft_kinds):
            yield (target.single_sublayer(build.for_layer(build.layer, f"mtp.layers.{i}"), kind),)

    def weights(self) -> dict[str, Target]:
        """Map the module's tensors to their destinations.

        The input norms and eh_proj are in the first block's module, the final norm in the last
        one's.
        """
        first = self.fc.weights() | {
            "enorm.weight": self.embed_norm.weight,
            "hnorm.weight": self.hidden_norm.weight,
        }
        table = {f"layers.0.{name}": target for name, target in first.items()}
        for i, block in enumerate(self.blocks):
            table.update({f"layers.{i}.{name}": t for name, t in block.weights().items()})
        table[f"layers.{len(self.blocks) - 1}.final_layernorm.weight"] = self.norm.weight
        return table
