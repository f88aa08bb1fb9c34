"""Write data/compressed_tensors.safetensors with the library compressed-tensors (0.20.0).

    pip install compressed-tensors loguru psutil
    python tests/quantization/write_compressed_tensors.py

Each case is a linear layer: the output of the library's compressor, and `value`, the output of its
decompressor. The settings of each case are in the file's metadata. The library takes nine seconds
to import, so tests read the file.
"""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).parent / "data" / "compressed_tensors.safetensors"
INT = {"type": "int", "num_bits": 4}
BYTE = {"type": "int", "num_bits": 8}
FLOAT = {"type": "float", "num_bits": 8}
CASES = {
    "int4": ("pack-quantized", {**INT, "strategy": "group", "group_size": 32}, (12, 2)),
    "int4-zeros": (
        "pack-quantized",
        {**INT, "strategy": "group", "group_size": 32, "symmetric": False},
        (12, 2),
    ),
    "int4-channel": ("pack-quantized", {**INT, "strategy": "channel"}, (12, 1)),
    "int8-channel": ("pack-quantized", {**BYTE, "strategy": "channel"}, (12, 1)),
    "int8-zeros": (
        "pack-quantized",
        {**BYTE, "strategy": "group", "group_size": 32, "symmetric": False},
        (12, 2),
    ),
    "int8": ("int-quantized", {**BYTE, "strategy": "channel"}, (12, 1)),
    "fp8-tensor": ("float-quantized", {**FLOAT, "strategy": "tensor"}, (1,)),
    "fp8-channel": ("float-quantized", {**FLOAT, "strategy": "channel"}, (12, 1)),
    "fp8-block": (
        "float-quantized",
        {**FLOAT, "strategy": "block", "block_structure": [128, 128]},
        (1, 1),
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        (12, 4),
    ),
}
"""(format, weights' settings, shape of the scales of a weight [12, 64])."""


def main() -> None:
    """Write the file."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    generator = torch.Generator().manual_seed(7)
    for name, (kind, settings, shape) in CASES.items():
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(kind)
        state = {
            "weight": torch.randn(12, 64, generator=generator),
            "weight_scale": 0.3 + 0.1 * torch.rand(shape, generator=generator),
        }
        if kind.startswith("nvfp4"):
            state["weight_global_scale"] = torch.tensor([37.0])
            state["weight_scale"] = (37 * state["weight_scale"]).to(torch.float8_e4m3fn).float()
        if not args.symmetric:
            zeros = torch.randint(-3, 4, shape, generator=generator, dtype=torch.int8)
            state["weight_zero_point"] = zeros
        packed = compressor.compress(state, scheme)
        value = compressor.decompress(packed, scheme)["weight"]
        tensors |= {f"{name}.{suffix}": x.contiguous() for suffix, x in packed.items()}
        tensors[f"{name}.value"] = value.float().contiguous()
        group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
        metadata[name] = json.dumps(
            {
                "quant_method": "compressed-tensors",
                "format": kind,
                "config_groups": {"group_0": group},
            }
        )
    save_file(tensors, FILE, metadata)


if __name__ == "__main__":
    main()
