"""GB/s of loading a checkpoint from the page cache, and the device memory that it takes at most.

    python benchmarks/loading.py FOLDER SCRATCH [--gb 20]

FOLDER holds a config.json. A checkpoint of its layers with random weights, in its weight format, is
written into SCRATCH (a folder in memory, such as /dev/shm/x), cut off behind the layer where it has
`--gb` gigabytes, and loaded. One JSON line is printed.
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
from lockstep.kernels.backends import load
from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model, load_weights
from lockstep.quantization import WeightSink, read_weight_format

SHARD = 4 << 30
"""Bytes of a file of the checkpoint, as hubs have them."""
WEIGHT = 0.02
"""Standard deviation of the random weights."""
GROUP = 128
"""Columns that share a scale."""
CPU = torch.device("cpu")
ZEROS = 0x77777777
"""Zero points of a symmetric checkpoint of GPTQ, eight in a word: others are refused."""


def main() -> None:
    """Writes, loads, prints."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("folder", type=Path)
    ask.add_argument("scratch", type=Path)
    ask.add_argument("--gb", type=float, default=20.0, help="about how much is written")
    given = ask.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shutil.copytree(given.folder, given.scratch, dirs_exist_ok=True)
    shorten(given.scratch, given.gb)
    write(given.scratch, device)
    load()
    checkpoint = Checkpoint.read(given.scratch)
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
        loaded = load_weights(checkpoint, model, None, lambda done, of: None, weight_format)
    figures = {"model": given.folder.name, "gb": round(loaded.bytes / 1e9, 2)}
    figures["gb_per_s"] = round(loaded.speed / 1e9, 2)
    if device == "cuda":
        figures["built_gb"] = round(built / 1e9, 2)
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    print(json.dumps(figures))


def slots(folder: Path) -> list[tuple[str, WeightSink]]:
    """The tensors that a checkpoint of the folder's config.json has. A published one of GPTQ has
    groups of columns where they are in order too."""
    sketched = sketch(folder, torch.bfloat16, None)
    weights: dict[str, Tensor | WeightSink] = sketched.model.weights()  # type: ignore[operator]
    found = {name: WeightSink.of(target) for name, target in weights.items()}
    settings = Checkpoint.read(folder).quantization() or {}
    if settings.get("quant_method") == "gptq":
        for name in [name for name in found if name.endswith("qweight")]:
            (words, _) = found[name].shape or (0, 0)
            groups = WeightSink(
                (words * 32 // settings["bits"],), (torch.int32,), CPU, lambda found: None
            )
            found.setdefault(name.replace("qweight", "g_idx"), groups)
    return list(found.items())


def size(found: list[tuple[str, WeightSink]]) -> int:
    """Their bytes."""
    return sum(torch.Size(slot.shape or ()).numel() * dtype(slot).itemsize for _, slot in found)


def dtype(slot: WeightSink) -> torch.dtype:
    """What a published checkpoint would hold."""
    return torch.bfloat16 if torch.bfloat16 in slot.dtypes else slot.dtypes[0]


def shorten(folder: Path, gigabytes: float) -> None:
    """Takes layers off config.json until the checkpoint has about so many gigabytes."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    layers = int(text["num_hidden_layers"])
    whole = size(slots(folder))
    kept = max(4, min(layers, int(layers * gigabytes * 1e9 / whole)))
    text["num_hidden_layers"] = kept
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:kept]
    (folder / "config.json").write_text(json.dumps(config))


def write(folder: Path, device: str) -> None:
    """The checkpoint's files."""
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, Tensor] = {}
    held = 0
    count = 0
    for name, slot in slots(folder):
        tensor = drawn(name, slot, device, generator)
        shard[name] = tensor.cpu()
        held += tensor.nbytes
        if held > SHARD:
            save_file(shard, folder / f"model-{count:05d}.safetensors")
            shard = {}
            held = 0
            count += 1
    save_file(shard, folder / f"model-{count:05d}.safetensors")


def drawn(name: str, slot: WeightSink, device: str, generator: torch.Generator) -> Tensor:
    """Random values of the slot's shape and dtype."""
    kind = dtype(slot)
    shape = slot.shape or ()
    if kind.is_floating_point:
        values = torch.randn(shape, device=device, generator=generator) * WEIGHT
        return values.to(kind)
    if name.endswith("g_idx"):
        return torch.arange(shape[0], dtype=kind) // GROUP
    if name.endswith("qzeros"):
        return torch.full(shape, ZEROS, device=device, dtype=kind)
    limits = torch.iinfo(kind)
    return torch.randint(
        limits.min, limits.max, shape, device=device, dtype=kind, generator=generator
    )


if __name__ == "__main__":
    main()
