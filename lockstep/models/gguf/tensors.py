"""Tensors of GGUF files by the names and in the layouts that safetensors have.

llama.cpp's converter renames tensors, joins experts, reorders rows and stores some parameters as
the values that its kernels need. This module undoes all of it. A tensor whose rows only move stays
quantized; a tensor whose values change or whose columns move is dequantized to fp32.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.models.config_reader import MAX_EXPERTS
from lockstep.models.gguf.config import (
    Hybrid,
    HybridMoE,
    Llama,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3MoE,
    Qwen3Next,
    Settings,
    settings_of,
)
from lockstep.models.gguf.file import GGUFFile, GGUFModel, TensorEntry
from lockstep.quantization import TensorInfo
from lockstep.quantization.gguf_blocks import PLAIN, dequantize

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
# Each table maps a module's name in the file to its name in safetensors, without the layer.
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
FUSED_EXPERTS = "ffn_gate_up_exps"
RECURRENT = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
SHARED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
DRAFT = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
READ_AS_SETTINGS = ("rope_freqs.weight",)
"""Tensors that lockstep.models.gguf.config turns into settings."""


@dataclass(frozen=True)
class View:
    """Tensor of the checkpoint, as a view of rows of a tensor of the file.

    begin, end: row range in the file's tensor. order: function of the number of rows that returns,
    for each row of the result, its row counted from begin. values: function of the dequantized
    rows. shape: of the result.
    """

    entry: TensorEntry
    begin: int
    end: int
    shape: tuple[int, ...]
    order: Callable[[int], Tensor] | None = None
    values: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def whole(cls, entry: TensorEntry) -> "View":
        """Return the view of a whole tensor."""
        return cls(entry, 0, entry.rows, entry.shape)

    @property
    def dtype(self) -> str:
        """Name of the dtype, as headers of safetensors and of GGUF spell it."""
        return "F32" if self.values is not None else self.entry.kind

    def rows(self) -> Tensor:
        """Return the rows as [rows, bytes] uint8."""
        rows = self.entry.read(self.begin, self.end)
        return rows if self.order is None else rows[self.order(len(rows))]

    def tensor(self) -> Tensor:
        """Return the tensor in its own dtype, or dequantized to fp32."""
        kind = self.entry.kind
        rows = self.rows()
        plain = kind in PLAIN and self.values is None
        weight = rows.view(PLAIN[kind][1]) if plain else dequantize(kind, rows)
        return (weight if self.values is None else self.values(weight)).view(self.shape)


def reorder(view: View, order: Callable[[int], Tensor]) -> View:
    """Return the view with its rows in another order."""
    return replace(view, order=order)


def with_values(view: View, values: Callable[[Tensor], Tensor], *shape: int) -> View:
    """Return the view with other values, and another shape where one is named."""
    return replace(view, values=values, shape=shape or view.shape)


def rotary_rows(heads: int, rows: int) -> Tensor:
    """Return for each row of q or k its row in a GGUF file of the architecture "llama".

    The converter makes the two dims of a rotary pair adjacent; in safetensors they are half a head
    apart. Raises CheckpointError for a number of rows that heads do not divide.
    """
    check_size(rows, -(-rows // (2 * heads)) * 2 * heads)
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def check_size(size: int, wanted: int) -> None:
    """Raise CheckpointError where a tensor has other rows or columns than the metadata says."""
    if size != wanted:
        raise CheckpointError(
            f"A GGUF tensor has {size} rows or columns where the metadata asks for {wanted}. "
            "Fetch the file again."
        )


def value_rows(key_heads: int, group: int, width: int, before: int, size: int) -> Tensor:
    """Return for each of `size` rows of a tensor that is ordered by value heads its row in the
    file.

    In safetensors the `group` value heads of a key head are adjacent; in the file the first value
    head of every key head comes first. width: rows of a value head. before: leading rows that are
    not reordered. Raises CheckpointError for another number of rows.
    """
    check_size(size, before + key_heads * group * width)
    rows = torch.arange(key_heads * group * width).view(group, key_heads, width)
    return torch.cat([torch.arange(before), before + rows.transpose(0, 1).flatten()])


class TensorNames:
    """Names and layouts of one model type's tensors.

    config: the settings as config.json has them. modules: module in the file -> module of a layer.
    experts: names of an expert's gate, up and down projections. mixture: name of the MoE module.
    """

    modules: Mapping[str, str] = ATTENTION | FFN_NORM | DENSE
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    mixture = "mlp"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def views(self, file: GGUFFile) -> Iterator[tuple[str, View]]:
        """Yield the name and the view of each tensor.

        Unknown names stay as they are, so that loading reports them.
        """
        for entry in file.tensors.values():
            if entry.name in READ_AS_SETTINGS:
                continue
            block = BLOCK.fullmatch(entry.name)
            if block is None:
                module, _, suffix = entry.name.rpartition(".")
                name = f"{OUTSIDE.get(module, module)}.{suffix}"
                yield name, self.adapt(module, suffix, View.whole(entry))
            else:
                yield from self.layer_views(int(block[1]), block[2], View.whole(entry))

    def layer_views(self, layer: int, name: str, view: View) -> Iterator[tuple[str, View]]:
        """Yield name and view of each checkpoint tensor that is stored in one tensor of a layer."""
        module, _, suffix = name.rpartition(".")
        fused = module in (*EXPERTS, FUSED_EXPERTS) and len(view.shape) == 3
        if fused and view.shape[0] <= MAX_EXPERTS:
            yield from self.expert_views(self.layer_name(layer), module, view)
            return
        known = self.modules.get(module)
        if known is None:
            yield view.entry.name, view
            return
        outside = known.startswith("mtp.")
        full = known if outside else f"{self.layer_name(layer)}.{known}"
        yield f"{full}.{suffix}", self.adapt(module, suffix, view)

    def layer_name(self, layer: int) -> str:
        """Return the checkpoint's name of a layer."""
        return f"model.layers.{layer}"

    def expert_views(self, layer: str, module: str, view: View) -> Iterator[tuple[str, View]]:
        """Yield name and view of each expert's matrices within a tensor [E, N, K]."""
        count, rows, columns = view.shape
        names = (self.experts[EXPERTS.index(module)],) if module in EXPERTS else self.experts[:2]
        size = rows // len(names)
        for index in range(count * len(names)):
            expert, part = divmod(index, len(names))
            begin = index * size
            part_view = replace(view, begin=begin, end=begin + size, shape=(size, columns))
            yield f"{layer}.{self.mixture}.experts.{expert}.{names[part]}.weight", part_view

    def adapt(self, module: str, suffix: str, view: View) -> View:
        """Return the view in the layout of safetensors."""
        return view


class LlamaTensorNames(TensorNames):
    """Llama: rows of q and k are reordered for another form of rotary positions."""

    def adapt(self, module: str, suffix: str, view: View) -> View:
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(module)
        if heads is None:
            return view
        order = partial(rotary_rows, self.config[heads])
        if len(view.shape) > 1:
            return reorder(view, order)
        # A bias is one row of the file.
        return with_values(view, lambda row: row[:, order(row.shape[1])])


class MixtralTensorNames(LlamaTensorNames):
    """Mixtral: Llama's layers with experts."""

    modules = ATTENTION | FFN_NORM | {"ffn_gate_inp": "block_sparse_moe.gate"}
    experts = ("w1", "w3", "w2")
    mixture = "block_sparse_moe"


class MoETensorNames(TensorNames):
    """Qwen3 with experts."""

    modules = ATTENTION | FFN_NORM | {"ffn_gate_inp": "mlp.gate"}


class HybridTensorNames(TensorNames):
    """Qwen3.5 and Qwen3-Next.

    The file stores norms as 1 + w, A_log as -exp(A_log), the convolution without its middle
    dimension, and value heads in the order of value_rows(), unless each key head has one.
    """

    modules = ATTENTION | DENSE | RECURRENT | SHARED | DRAFT

    def layer_name(self, layer: int) -> str:
        """Return the name of a layer; layers after the last belong to the draft module."""
        count = self.config["num_hidden_layers"]
        return f"model.layers.{layer}" if layer < count else f"mtp.layers.{layer - count}"

    def layer_views(self, layer: int, name: str, view: View) -> Iterator[tuple[str, View]]:
        mixer = f"{self.layer_name(layer)}.linear_attn"
        size = prod(view.shape)
        if name == "ssm_a":
            yield f"{mixer}.A_log", with_values(view, self._log_of_decay, size)
        elif name == "ssm_dt.bias":
            yield f"{mixer}.dt_bias", with_values(view, self._by_value_head, size)
        elif name == "ssm_ba.weight":
            yield from self._beta_and_alpha(mixer, view)
        else:
            yield from super().layer_views(layer, name, view)

    def adapt(self, module: str, suffix: str, view: View) -> View:
        # The gated norm is the one whose weight is not stored around zero.
        if module.endswith("norm") and module != "ssm_norm":
            return with_values(view, lambda weight: weight - 1)
        if module == "ssm_conv1d" and len(view.shape) == 2:
            channels, taps = view.shape
            return replace(view, order=self._order(module), shape=(channels, 1, taps))
        if module == "ffn_gate_inp_shexp" and len(view.shape) == 1:
            return replace(view, shape=(1, view.shape[-1]))
        # Reordering columns breaks quantization blocks, so ssm_out is dequantized.
        if module == "ssm_out" and self._group > 1:
            order = partial(self._value_rows, self.config["linear_value_head_dim"], 0)
            return with_values(view, lambda weight: weight[:, order(weight.shape[1])])
        order_of = self._order(module)
        return view if order_of is None else reorder(view, order_of)

    @property
    def _group(self) -> int:
        """Return the value heads per key head; 1 if they are in order."""
        heads: int = self.config["linear_num_value_heads"]
        return heads // self.config["linear_num_key_heads"]

    def _order(self, module: str) -> Callable[[int], Tensor] | None:
        """Return the order of a module's rows; None: as in the file."""
        if self._group == 1:
            return None
        width = self.config["linear_value_head_dim"]
        keys = 2 * self.config["linear_num_key_heads"] * self.config["linear_key_head_dim"]
        orders = {
            "attn_qkv": partial(self._value_rows, width, keys),
            "ssm_conv1d": partial(self._value_rows, width, keys),
            "attn_gate": partial(self._value_rows, width, 0),
            "ssm_alpha": partial(self._value_rows, 1, 0),
            "ssm_beta": partial(self._value_rows, 1, 0),
        }
        return orders.get(module)

    def _value_rows(self, width: int, before: int, size: int) -> Tensor:
        return value_rows(self.config["linear_num_key_heads"], self._group, width, before, size)

    def _by_value_head(self, stored: Tensor) -> Tensor:
        flat = stored.flatten()
        return flat if self._group == 1 else flat[self._value_rows(1, 0, len(flat))]

    def _log_of_decay(self, stored: Tensor) -> Tensor:
        return self._by_value_head(stored).neg().log()

    def _beta_and_alpha(self, mixer: str, view: View) -> Iterator[tuple[str, View]]:
        """Yield the two halves of Qwen3-Next's ssm_ba: per key head its rows of b, then of a."""
        groups = self.config["linear_num_key_heads"]
        group = self.config["linear_num_value_heads"] // groups
        shape = (groups * group, view.shape[-1])
        for part, name in enumerate(("in_proj_b", "in_proj_a")):

            def order(size: int, part: int = part) -> Tensor:
                check_size(size, 2 * groups * group)
                return torch.arange(size).view(groups, 2, group)[:, part].flatten()

            yield f"{mixer}.{name}.weight", replace(view, order=order, shape=shape)


class Qwen3NextTensorNames(HybridTensorNames):
    """Qwen3-Next: value heads are in their order."""

    _group = 1


NAMES: Mapping[type[Settings], type[TensorNames]] = {
    Llama: LlamaTensorNames,
    Mixtral: MixtralTensorNames,
    Qwen2: TensorNames,
    Qwen3: TensorNames,
    Qwen3MoE: MoETensorNames,
    Hybrid: HybridTensorNames,
    HybridMoE: HybridTensorNames,
    Qwen3Next: Qwen3NextTensorNames,
}


@dataclass(frozen=True)
class GGUFWeightFile:
    """A GGUF file of a checkpoint, read as a safetensors file is.

    views: of the tensors, by their names in safetensors.
    """

    path: Path
    views: Mapping[str, View]

    @contextmanager
    def open(self, values: bool = False) -> Iterator[tuple["GGUFWeightFile", list[str]]]:
        """Yield the file and the names of its tensors. values: as in Shard.open()."""
        yield self, list(self.views)

    def info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor."""
        view = self.views[name]
        return TensorInfo(name, view.shape, view.dtype)

    def read(self, name: str, dtypes: Sequence[torch.dtype]) -> Tensor:
        """Return a tensor: its blocks as [rows, bytes] uint8 if dtypes include uint8, else its
        values.
        """
        view = self.views[name]
        quantized = view.dtype not in PLAIN
        return view.rows() if quantized and torch.uint8 in dtypes else view.tensor()


def gguf_weight_files(paths: Sequence[Path]) -> list[GGUFWeightFile]:
    """Return the files of one checkpoint; the first has the metadata.

    Raises CheckpointError where a file is damaged or of an unsupported architecture.
    """
    model = GGUFModel(paths)
    settings = settings_of(model)
    names = NAMES[type(settings)](settings.read())
    return [GGUFWeightFile(file.path, views_by_name(names, file)) for file in model.files]


def views_by_name(names: TensorNames, file: GGUFFile) -> dict[str, View]:
    """Return the views of a file. Raises CheckpointError where two tensors become one."""
    views: dict[str, View] = {}
    for name, view in names.views(file):
        if name in views:
            raise CheckpointError(
                f"{file.path}: {views[name].entry.name[:100]!r} and {view.entry.name[:100]!r} are "
                f"both {name[:100]!r}; allowed: one of them. Fetch the file again."
            )
        views[name] = view
    return views
