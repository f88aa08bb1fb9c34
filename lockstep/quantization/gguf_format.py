"""Weight format of GGUF files, in which every tensor has its own quantized type.

The dtype of a quantized tensor is its type's name, and the file reader returns its rows as stored:
[N, bytes] uint8. They are repacked for the kernels without changing a value: Q4_0 and Q8_0 as
integers in groups of 32 with fp16 scales (IntWeight), the other types as GgufWeight.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import (
    GgufWeight,
    IntWeight,
    QuantizedWeight,
    pack_codes,
    row_chunks,
)
from lockstep.quantization.gguf_blocks import (
    LAYOUTS,
    BlockFields,
    BlockLayout,
    bytes_per_row,
    layout_of,
)
from lockstep.quantization.settings_reader import EDIT_REMEDY, SettingsReader, read_strictly
from lockstep.quantization.storage import FLOAT_NAMES
from lockstep.quantization.weight_format import (
    CheckpointLinear,
    Layout,
    WeightFormat,
    damaged_error,
)
from lockstep.quantization.weight_sink import WeightSink

INTEGERS = ("Q4_0", "Q8_0")
"""Types whose values are (code - 2^(bits - 1)) * scale, in 4 or 8 bits."""


def read(settings: Mapping[str, Any]) -> "GGUFWeightFormat":
    """Return the format of these settings. Raises CheckpointError for settings that are unknown."""
    return read_strictly(settings, "gguf", GGUFWeightFormat)


class GGUFWeightFormat(WeightFormat):
    """Weights in the types of their tensors. name: "gguf", and the types where settings list them.

    The setting `types` names the quantized types that occur, for numerics.
    """

    # Repacking blocks of a weight that is dequantized afterwards takes three times as long as
    # dequantizing them: 1.2 s and 0.35 s for 2,048 x 4,096 weights of Q4_K on one thread.
    reader_dequantizes = True

    def __init__(self, settings: SettingsReader) -> None:
        types = settings.names("types")
        unknown = [kind for kind in types if kind not in LAYOUTS]
        if unknown:
            raise settings.error("types", unknown[0], ", ".join(LAYOUTS), EDIT_REMEDY)
        self.name = "-".join(["gguf", *sorted(set(types))])

    def layout(self, module: CheckpointLinear) -> Layout | None:
        kind = _kind(module)
        if kind is None:
            return None
        type = layout_of(kind).type
        if kind in INTEGERS:
            return Layout.of(
                IntWeight, bits=type.bits, group=type.group, scale_dtype=torch.float16,
                zeros=False, g_idx=False,
            )  # fmt: skip
        return Layout.of(GgufWeight, type_name=kind)

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        kind = _kind(module)
        assert kind is not None, "the layout said so"
        (n, k) = weight.shape

        def fill(blocks: Tensor) -> None:
            layout = layout_of(kind)
            for begin, end in row_chunks(n, k):
                fields = layout.split(blocks[begin:end].reshape(-1, layout.nbytes))
                _check(module, fields)
                _store(weight.rows(begin, end), fields, layout)

        shape = (module.whole_outputs, bytes_per_row(kind, k))
        return {"weight": WeightSink(shape, (torch.uint8,), weight.device, fill)}


def _kind(module: CheckpointLinear) -> str | None:
    """Return the quantized type of a module's weight; None if it is plain or has no file.

    Raises CheckpointError for a type that is not built.
    """
    info = (module.tensors or {}).get("weight")
    if info is None or info.dtype in FLOAT_NAMES:
        return None
    layout_of(info.dtype)
    return info.dtype


def _check(module: CheckpointLinear, fields: BlockFields) -> None:
    """Raise CheckpointError where scales or minima are no finite numbers."""
    for numbers in (fields.scales, fields.minima):
        if numbers is not None and not bool(numbers.isfinite().all()):
            raise damaged_error(module, "weight", "has scales that are infinite or NaN")


def _store(weight: QuantizedWeight, fields: BlockFields, layout: BlockLayout) -> None:
    """Fill rows of a weight with the fields of their blocks."""
    (n, k) = weight.shape
    codes = fields.codes.view(n, k)
    if isinstance(weight, IntWeight):
        weight.words.copy_(pack_codes(codes, weight.bits))
        weight.scales.copy_(fields.scales.view(n, -1))
        return
    assert isinstance(weight, GgufWeight), "the layout is of one or the other"
    weight.fill_codes(codes)
    _store_by_group(weight.scales, weight.bases, fields.scales, fields.steps)
    if weight.minima is not None:
        assert fields.minima is not None, "the type has minima"
        _store_by_group(weight.minima, weight.min_bases, fields.minima, fields.min_steps)


def _store_by_group(
    numbers: Tensor, bases: Tensor | None, base: Tensor, steps: Tensor | None
) -> None:
    """Fill scales or minima [N, G]: as steps of bases, or directly without bases."""
    if bases is None:
        numbers.copy_(base.view(numbers.shape))
        return
    assert steps is not None, "a base has steps"
    bases.copy_(base.view(bases.shape))
    numbers.copy_(steps.view(numbers.shape))
