"""Storage of quantized weights in checkpoints: their tensors, and how they are loaded.

A format (fp8.py, compressed_tensors.py, modelopt.py) chooses the storage of each linear layer.
Scales per tensor become scales per output column, so that layers with different scales can be
fused.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from lockstep.errors import brief
from lockstep.kernels.formats.weights import (
    MAX_FP4_FACTOR,
    Fp4Weight,
    Fp8Weight,
    IntWeight,
    QuantizedWeight,
    pack_codes,
    row_chunks,
)
from lockstep.quantization.settings_reader import SettingsReader
from lockstep.quantization.weight_format import (
    EXPERT_PATH,
    NOT_NN_LINEAR,
    CheckpointLinear,
    Layout,
    TensorInfo,
    WeightFormat,
    contradiction_error,
    damaged_error,
    is_usually_unquantized,
)
from lockstep.quantization.weight_sink import FLOAT_DTYPES, WeightSink

FP8_BLOCK = 128
"""Rows and columns of a block with one scale. Source: DeepSeek-V3, arXiv 2412.19437, 3.3.2."""
FP4_GROUP = 16
"""Columns that share a scale in NVFP4."""
FLOAT_NAMES = ("F32", "BF16", "F16")
"""Dtypes of plain weights, as safetensors spells them."""
SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SCALES_OF_KV = "--kv-cache-dtype chooses the KV cache format, and fp8 takes the scales"
"""Reason that notes give for KV cache settings that are not followed."""
KV_ALGORITHM = "kv_cache_quant_algo"
"""ModelOpt's setting for the format of static KV scales."""
KV_SCHEME = "kv_cache_scheme"
"""Setting of compressed-tensors and later ModelOpt for the KV scales: an object."""
SIDECARS = (
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
)
"""Tensors that only a quantized linear layer has."""


class Storage(ABC):
    """Storage of one linear layer's weight in checkpoint tensors."""

    @abstractmethod
    def needs(self, module: CheckpointLinear) -> tuple[str, ...]:
        """Return the suffixes of the required tensors."""

    @abstractmethod
    def layout(self, module: CheckpointLinear) -> Layout:
        """Return the layout on the device."""

    @abstractmethod
    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        """Map the suffix of each tensor to the sink that fills these rows."""


class StoredWeightFormat(WeightFormat):
    """Weight format whose quantized layers each have a Storage."""

    @abstractmethod
    def storage(self, module: CheckpointLinear) -> Storage | None:
        """Return the storage of a linear layer; None if it is plain.

        Raises:
            CheckpointError: settings and tensors contradict each other.
        """

    def layout(self, module: CheckpointLinear) -> Layout | None:
        storage = self.storage(module)
        return None if storage is None else storage.layout(module)

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        storage = self.storage(module)
        assert storage is not None, "a format quantizes it"
        return storage.sinks(module, weight)


def resolve_storage(
    module: CheckpointLinear, expected: Storage | None, setting: str, *, covers_all: bool = False
) -> Storage | None:
    """Return the storage that the settings give a linear layer, checked against its tensors.

    Args:
        expected: the storage according to the settings, None for a plain weight.
        setting: the setting that says so, for messages.
        covers_all: the setting covers all linear layers and names none. Experts may then be plain
            (EXPERT_PATH), as may layers that are usually unquantized.

    Without files (dummy weights) modules of NOT_NN_LINEAR are plain.

    Raises:
        CheckpointError: the tensors contradict the settings.
    """
    if module.tensors is None:
        return None if module.path.rpartition(".")[2] in NOT_NN_LINEAR else expected
    weight = module.tensors.get("weight")
    quantized = is_stored_quantized(module)
    if expected is None:
        if quantized:
            raise contradiction_error(module, f"{setting} asks for a weight that is not quantized")
        return None
    needed = ", ".join(expected.needs(module))
    if not quantized:
        # Tools skip such layers without listing them, so their tensors decide.
        if (
            weight is None
            or is_usually_unquantized(module)
            or (covers_all and EXPERT_PATH in module.path)
        ):
            return None
        raise contradiction_error(module, f"{setting} asks for {needed}")
    if not all(suffix in module.tensors for suffix in expected.needs(module)):
        raise contradiction_error(module, f"{setting} asks for {needed}")
    return expected


def is_stored_quantized(module: CheckpointLinear) -> bool:
    """Return whether the tensors are those of a quantized weight; False without files."""
    tensors = module.tensors or {}
    weight = tensors.get("weight")
    not_float = weight is not None and weight.dtype not in FLOAT_NAMES
    return not_float or any(suffix in tensors for suffix in SIDECARS)


def non_fp8_kv_setting(settings: SettingsReader) -> str | None:
    """Return the setting that says that static KV scales are not of fp8; None if none does."""
    algorithm = settings.raw.get(KV_ALGORITHM, "FP8")
    if not str(algorithm).upper().startswith("FP8"):
        return f"{settings.within}{KV_ALGORITHM}={brief(algorithm)}"
    scheme = settings.raw.get(KV_SCHEME, {})
    if isinstance(scheme, dict):
        fp8 = (scheme.get("num_bits", 8), scheme.get("type", "float")) == (8, "float")
    else:
        fp8 = str(scheme).lower() == "fp8"
    return None if fp8 else f"{settings.within}{KV_SCHEME}={brief(scheme)}"


def enclosing_modules(name: str) -> Iterator[str]:
    """Yield a module's name, then the names of the modules that enclose it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


@dataclass(frozen=True)
class Fp8Storage(Storage):
    """FP8 weight: `weight` e4m3fn [N, K], and scales that multiply it.

    scale: suffix of the scales. other_scale: an alternative suffix. scale_units: parts of the
    weight that may share a scale: "tensor", "channel" (an output column) or "block" of FP8_BLOCK
    rows and columns. Block scales are [R, C] or [R, 1, C, 1].
    """

    scale: str
    scale_units: tuple[str, ...]
    other_scale: str = ""

    def needs(self, module: CheckpointLinear) -> tuple[str, ...]:
        return ("weight", self._suffix(module))

    def layout(self, module: CheckpointLinear) -> Layout:
        """Return block scales if whole blocks fit the columns, else a scale per output column."""
        # A layer or a rank that ends within a block would share it with its neighbour in a fused
        # weight, so it takes a scale per row.
        edges = [edge for pair in module.ranges for edge in pair]
        whole_blocks = all(edge % FP8_BLOCK == 0 for edge in (module.outputs, *edges))
        if "block" not in self.scale_units:
            return Layout.of(Fp8Weight, block_n=1, block_k=module.inputs)
        return Layout.of(Fp8Weight, block_n=FP8_BLOCK if whole_blocks else 1, block_k=FP8_BLOCK)

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        assert isinstance(weight, Fp8Weight)
        (n, k) = (module.whole_outputs, module.inputs)
        shapes = {
            "tensor": [(), (1,), (1, 1)],
            "channel": [(n, 1), (n,)],
            "block": block_scale_shapes(n, k),
        }
        known = [shape for unit in self.scale_units for shape in shapes[unit]]
        scale = self._suffix(module)
        return {
            "weight": WeightSink(
                (n, k), (torch.float8_e4m3fn,), weight.device, byte_filler(weight)
            ),
            scale: finite_sink(
                module,
                scale,
                known,
                FLOAT_DTYPES,
                weight.device,
                lambda x: self._scale(module, weight, x),
                # A block's scales are few: the fill picks the rows of this rank.
                None if "block" in self.scale_units else 0,
            ),
        }

    def _suffix(self, module: CheckpointLinear) -> str:
        """Return the suffix that the layer's scales have."""
        tensors = module.tensors or {}
        return (
            self.other_scale
            if self.other_scale in tensors and self.scale not in tensors
            else self.scale
        )

    def _scale(self, module: CheckpointLinear, weight: Fp8Weight, scales: Tensor) -> None:
        """Fill the scales from the checkpoint's: block scales arrive unsliced."""
        if "block" not in self.scale_units:
            weight.scales.copy_(scales.float().view(-1, 1))
            return
        n = module.whole_outputs
        unit = FP8_BLOCK if weight.block_n == 1 else 1
        rows = expand_to_rows(scales.float().view(-(-n // FP8_BLOCK), -1), n, unit)
        step = weight.block_n
        row_slices = [rows[begin // step : end // step] for begin, end in module.ranges]
        weight.scales.copy_(torch.cat(row_slices) if row_slices else rows)


def block_scale_shapes(n: int, k: int) -> list[tuple[int, ...]]:
    """Return the possible shapes of the block scales of a weight [n, k]."""
    rows = -(-n // FP8_BLOCK)
    columns = -(-k // FP8_BLOCK)
    return [(rows, columns), (rows, 1, columns, 1)]


@dataclass(frozen=True)
class Fp4Storage(Storage):
    """NVFP4 weight: e2m1 codes in uint8 [N, K / 2], low nibble first, `weight_scale` e4m3 [N, K /
    16].

    One factor scales the whole weight, as a multiplier or a divisor; a divisor's reciprocal is
    taken once, in fp32. weight, factor: suffixes of the codes and the factor. divides: whether the
    factor is a divisor.
    """

    weight: str
    factor: str
    divides: bool

    def needs(self, module: CheckpointLinear) -> tuple[str, ...]:
        return (self.weight, "weight_scale", self.factor)

    def layout(self, module: CheckpointLinear) -> Layout:
        return Layout.of(Fp4Weight)

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        assert isinstance(weight, Fp4Weight)
        (n, k) = (module.whole_outputs, module.inputs)
        device = weight.device
        scales: list[tuple[int, ...]] = [(n, -(-k // FP4_GROUP))]
        fp8 = (torch.float8_e4m3fn,)
        return {
            self.weight: WeightSink((n, -(-k // 2)), (torch.uint8,), device, nibble_filler(weight)),
            "weight_scale": finite_sink(
                module, "weight_scale", scales, fp8, device,
                lambda x: weight.scales.copy_(x.view(torch.uint8)),
            ),
            self.factor: finite_sink(
                module, self.factor, [(), (1,), (1, 1)], (torch.float32,), device,
                lambda x: self._factor(module, weight, x.view(())),
            ),
        }  # fmt: skip

    def _factor(self, module: CheckpointLinear, weight: Fp4Weight, stored: Tensor) -> None:
        if self.divides and not bool(stored > 0):
            raise damaged_error(module, self.factor, f"is {float(stored)}, expected more than 0")
        # One rounding here; a kernel that divided each value would round differently.
        factor = stored.reciprocal() if self.divides else stored
        if not bool(factor.abs() < MAX_FP4_FACTOR):
            problem = (
                f"is {float(stored)}, which multiplies by {float(factor)}, expected below 2^119"
            )
            raise damaged_error(module, self.factor, problem)
        weight.factors.copy_(factor)


@dataclass(frozen=True)
class IntStorage(Storage):
    """Integer weight of 4 or 8 bits with scales: words of codes along K, or int8.

    in_words: `weight_packed` int32 [N, ceil(K bits / 32)] of codes q + 2^(bits - 1), lowest bits
    first, and `weight_shape`; otherwise `weight` int8 [N, K]. group: columns that share a scale, -1
    for all columns, 0 for one scale of the whole weight. symmetric: False if there is a
    `weight_zero_point`: int8 of the scales' shape, or words along N. ordered: `weight_g_idx` gives
    the group of each column.
    """

    bits: int
    group: int
    in_words: bool
    symmetric: bool
    ordered: bool

    def needs(self, module: CheckpointLinear) -> tuple[str, ...]:
        codes = ("weight_packed", "weight_shape") if self.in_words else ("weight",)
        zeros = () if self.symmetric else ("weight_zero_point",)
        order = ("weight_g_idx",) if self.ordered else ()
        return (*codes, "weight_scale", *zeros, *order)

    def layout(self, module: CheckpointLinear) -> Layout:
        tensors = module.tensors or {}
        options = dict(
            bits=self.bits,
            group=self.group if self.group > 0 else module.inputs,
            scale_dtype=scale_dtype(tensors.get("weight_scale")),
            zeros=self._has(module, "weight_zero_point"),
            g_idx=self._has(module, "weight_g_idx"),
        )
        layout = Layout.of(IntWeight, **options)
        # All rows of a weight share one g_idx, so layers with different orders cannot be fused.
        return replace(layout, fusion_key=module.path) if options["g_idx"] else layout

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        assert isinstance(weight, IntWeight)
        (n, k) = (module.whole_outputs, module.inputs)
        device = weight.device
        scales = [(n, *weight.scales.shape[1:])] if self.group else [(1,), (), (1, 1)]
        sinks = {
            "weight_scale": finite_sink(
                module, "weight_scale", scales, FLOAT_DTYPES, device,
                lambda x: weight.scales.copy_(x.view(-1, x.shape[-1] if x.dim() else 1)),
            )
        }  # fmt: skip
        if self.in_words:
            shape = (n, -(-k * self.bits // 32))
            fill = nibble_filler(weight) if self.bits == 4 else byte_filler(weight)
            sinks["weight_packed"] = WeightSink(shape, (torch.int32,), device, fill)
            sinks["weight_shape"] = WeightSink(
                (2,),
                (torch.int64, torch.int32),
                torch.device("cpu"),
                lambda x: check_shape(module, x),
                None,
            )
        else:
            sinks["weight"] = WeightSink((n, k), (torch.int8,), device, byte_filler(weight, 128))
        if weight.zeros is not None:
            sinks["weight_zero_point"] = self._zeros(module, weight, scales)
        if weight.g_idx is not None:
            sinks["weight_g_idx"] = WeightSink(
                (k,),
                (torch.int32, torch.int64),
                device,
                lambda x: fill_g_idx(module, weight, x),
                None,
            )
        return sinks

    def _has(self, module: CheckpointLinear, suffix: str) -> bool:
        return suffix in (self.needs(module) if module.tensors is None else module.tensors)

    def _zeros(
        self, module: CheckpointLinear, weight: IntWeight, scales: list[tuple[int, ...]]
    ) -> WeightSink:
        """Return the sink of zero points; older files store them as int8."""
        assert weight.zeros is not None
        zeros = weight.zeros
        (n, groups) = zeros.shape
        in_words = self.in_words and has_dtype(module, "weight_zero_point", "I32")
        words = -(-module.whole_outputs * self.bits // 32)
        shapes: list[tuple[int, ...]] = [(words, groups)] if in_words else scales
        middle = 2 ** (self.bits - 1)

        def fill(stored: Tensor) -> None:
            if in_words:
                zeros.copy_(unpack_along_n(stored, self.bits, n))
                return
            codes = stored.short() + middle
            if not bool(((codes >= 0) & (codes < 2**self.bits)).all()):
                problem = f"has zero points other than {-middle} to {middle - 1}"
                raise damaged_error(module, "weight_zero_point", problem)
            zeros.copy_(codes.view(-1, stored.shape[-1] if stored.dim() else 1))

        dtype = torch.int32 if in_words else torch.int8
        unit = 32 // self.bits if in_words else 1
        return finite_sink(
            module, "weight_zero_point", shapes, (dtype,), weight.device, fill, 0, unit
        )


def finite_sink(
    module: CheckpointLinear,
    suffix: str,
    shapes: list[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    fill: Callable[[Tensor], object],
    shard_axis: int | None = 0,
    outputs_per_element: int = 1,
) -> WeightSink:
    """Return the sink of a tensor that may have any of these shapes and must be finite.

    A tensor of one element is a scale of the whole weight, which every rank takes.
    """
    info = None if module.tensors is None else module.tensors.get(suffix)
    shape = info.shape if info is not None and info.shape in shapes else shapes[0]

    def check(tensor: Tensor) -> None:
        if not bool(tensor.float().isfinite().all()):
            raise damaged_error(module, suffix, "has entries that are not finite numbers")
        fill(tensor)

    axis = None if prod(shape) == 1 else shard_axis
    return WeightSink(shape, dtypes, device, check, axis, outputs_per_element)


def has_dtype(module: CheckpointLinear, suffix: str, dtype: str) -> bool:
    """Return whether a tensor of the layer has this safetensors dtype."""
    info = None if module.tensors is None else module.tensors.get(suffix)
    return info is None or info.dtype == dtype


def scale_dtype(info: TensorInfo | None) -> torch.dtype:
    """Return the dtype of stored scales: the checkpoint's, bf16 without files."""
    return torch.bfloat16 if info is None else SCALE_DTYPES.get(info.dtype, torch.float32)


def expand_to_rows(scales: Tensor, n: int, block: int) -> Tensor:
    """Expand scales [R, C] of row blocks to [n, C]."""
    return scales.repeat_interleave(block, 0)[:n]


def nibbles(data: Tensor) -> Tensor:
    """Unpack uint8 [N, B] to 4-bit codes [N, 2 B], low nibble first."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def nibble_filler(weight: QuantizedWeight) -> Callable[[Tensor], None]:
    """Return a function that fills a weight from 4-bit codes, lowest bits first."""

    def fill(stored: Tensor) -> None:
        (n, k) = weight.shape
        for begin, end in row_chunks(n, k):
            codes = nibbles(stored[begin:end].view(torch.uint8))[:, :k]
            weight.words[begin:end] = pack_codes(codes, 4)

    return fill


def byte_filler(weight: QuantizedWeight, offset: int = 0) -> Callable[[Tensor], None]:
    """Return a function that fills a weight from 8-bit codes in bytes or words.

    offset: added modulo 256; 128 turns signed integers into codes.
    """

    def fill(stored: Tensor) -> None:
        (n, k) = weight.shape
        for begin, end in row_chunks(n, k):
            codes = stored[begin:end].view(torch.uint8)[:, :k]
            weight.words[begin:end] = pack_codes(codes + offset if offset else codes, 8)

    return fill


def unpack_along_n(words: Tensor, bits: int, n: int) -> Tensor:
    """Unpack int32 [W, G] that packs codes along N, lowest bits first, to uint8 [n, G]."""
    # The bytes of a little-endian word are its codes from the lowest bits on.
    data = words.t().contiguous().view(torch.uint8)
    codes = nibbles(data) if bits == 4 else data
    return codes[:, :n].t()


def check_shape(module: CheckpointLinear, stored: Tensor) -> None:
    """Check `weight_shape` against the layer's shape."""
    if stored.tolist() != [module.whole_outputs, module.inputs]:
        expected = [module.whole_outputs, module.inputs]
        fault = f"is {brief(stored.tolist())}, config.json asks for {expected}"
        raise damaged_error(module, "weight_shape", fault)


def fill_g_idx(module: CheckpointLinear, weight: IntWeight, groups_of_columns: Tensor) -> None:
    """Copy the group of each column; all -1 means that columns are in order."""
    assert weight.g_idx is not None
    groups = weight.scales.shape[1]
    if bool((groups_of_columns == -1).all()):
        groups_of_columns = torch.arange(weight.k, device=weight.device) // weight.group
    if not bool(((groups_of_columns >= 0) & (groups_of_columns < groups)).all()):
        fault = f"has entries that are no groups, of which there are {groups}"
        raise damaged_error(module, "weight_g_idx", fault)
    weight.g_idx.copy_(groups_of_columns)
