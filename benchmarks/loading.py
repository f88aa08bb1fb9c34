"""Speed of loading a checkpoint from the page cache, and its peak device memory.

    python benchmarks/loading.py FOLDER SCRATCH [--gb 20]

FOLDER contains a config.json. The script writes a checkpoint with random weights in its weight
format to SCRATCH (a folder in memory, such as /dev/shm/x), with as many layers as fit --gb
gigabytes, and loads it. Prints one JSON line.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.bench.floor import sketch
from lockstep.bench.measurement import print_json
from lockstep.kernels.backends import load
from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model, load_weights
from lockstep.quantization import WeightSink, read_weight_format

SHARD = 4 << 30
"""Bytes of one checkpoint file, as on model hubs."""
WEIGHT = 0.02
"""Standard deviation of the random weights."""
GROUP = 128
"""Columns that share one scale."""
CPU = torch.device("cpu")
ZEROS = 0x77777777
"""Zero points of a symmetric GPTQ checkpoint, eight in a word. Other values are refused."""


def main() -> None:
    """Write the checkpoint, load it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--gb", type=float, default=20.0, help="approximate size of the checkpoint")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shutil.copytree(args.folder, args.scratch, dirs_exist_ok=True)
    shorten(args.scratch, args.gb)
    write(args.scratch, device)
    load()
    checkpoint = Checkpoint.read(args.scratch)
    weight_format = read_weight_format(checkpoint.quantization(), None)
    build = BuildContext(
        device=device,
        dtype=torch.bfloat16,
        window=1,
        max_positions=1,
        max_model_len=1,
        tensors=checkpoint.tensors(),
        prefixes=checkpoint.architecture.PREFIXES,
        weight_format=weight_format,
    )
    with torch.inference_mode():
        model = build_model(checkpoint.raw, build)
        built = torch.cuda.memory_allocated() if device == "cuda" else 0
        loaded = load_weights(checkpoint, model, None, lambda done, total: None, weight_format)
    figures = {"model": args.folder.name, "gb": round(loaded.bytes / 1e9, 2)}
    figures["gb_per_s"] = round(loaded.speed / 1e9, 2)
    if device == "cuda":
        figures["built_gb"] = round(built / 1e9, 2)
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    print_json(figures)


def checkpoint_tensors(folder: Path) -> list[tuple[str, WeightSink]]:
    """Return the tensors of a checkpoint with the folder's config.json.

    Published GPTQ checkpoints store g_idx also where groups are in order, so it is added.
    """
    sketched = sketch(folder, torch.bfloat16, None)
    weights: dict[str, Tensor | WeightSink] = sketched.model.weights()  # type: ignore[operator]
    sinks = {name: WeightSink.of(target) for name, target in weights.items()}
    settings = Checkpoint.read(folder).quantization() or {}
    if settings.get("quant_method") == "gptq":
        for name in [name for name in sinks if name.endswith("qweight")]:
            (words, _) = sinks[name].shape or (0, 0)
            groups = WeightSink(
                (words * 32 // settings["bits"],), (torch.int32,), CPU, lambda tensor: None
            )
            sinks.setdefault(name.replace("qweight", "g_idx"), groups)
    return list(sinks.items())


def size(sinks: list[tuple[str, WeightSink]]) -> int:
    """Return the bytes of all tensors."""
    return sum(torch.Size(sink.shape or ()).numel() * dtype(sink).itemsize for _, sink in sinks)


def dtype(sink: WeightSink) -> torch.dtype:
    """Return the dtype of the tensor in a published checkpoint."""
    return torch.bfloat16 if torch.bfloat16 in sink.dtypes else sink.dtypes[0]


def shorten(folder: Path, gigabytes: float) -> None:
    """Remove layers from config.json until the checkpoint has about `gigabytes` GB."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    layers = int(text["num_hidden_layers"])
    total = size(checkpoint_tensors(folder))
    num_kept = max(4, min(layers, int(layers * gigabytes * 1e9 / total)))
    text["num_hidden_layers"] = num_kept
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_kept]
    (folder / "config.json").write_text(json.dumps(config))


def write(folder: Path, device: str) -> None:
    """Write the checkpoint's files."""
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    count = 0
    for name, sink in checkpoint_tensors(folder):
        tensor = random_tensor(name, sink, device, generator)
        shard[name] = tensor.cpu()
        shard_bytes += tensor.nbytes
        if shard_bytes > SHARD:
            save_file(shard, folder / f"model-{count:05d}.safetensors")
            shard = {}
            shard_bytes = 0
            count += 1
    save_file(shard, folder / f"model-{count:05d}.safetensors")


def random_tensor(name: str, sink: WeightSink, device: str, generator: torch.Generator) -> Tensor:
    """Return random values of the sink's shape and dtype."""
    element_type = dtype(sink)
    shape = sink.shape or ()
    if element_type.is_floating_point:
        values = torch.randn(shape, device=device, generator=generator) * WEIGHT
        return values.to(element_type)
    if name.endswith("g_idx"):
        return torch.arange(shape[0], dtype=element_type) // GROUP
    if name.endswith("qzeros"):
        return torch.full(shape, ZEROS, device=device, dtype=element_type)
    limits = torch.iinfo(element_type)
    return torch.randint(
        limits.min, limits.max, shape, device=device, dtype=element_type, generator=generator
    )


if __name__ == "__main__":
    main()
