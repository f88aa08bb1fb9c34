"""An independent writer of quantized checkpoints in numpy, from the published bit layouts."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


EXPERTS_ONLY: dict[str, dict[str, str]] = {
    "lm_head": {},
    "model.language_model.embed_tokens": {},
    "-:.*attn.*": {},
    "-:.*shared_expert.*": {},
    "-:.*mtp.*": {},
    "-:.*visual.*": {},
}
"""`dynamic` of released GPTQ mixtures: only routed experts are quantized."""


def pack_words(values: np.ndarray, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Pack values [R, C] below 2^bits into int32 words, 32 / bits neighbours along axis in each."""
    rows = values if axis == 1 else values.T
    count = 32 // bits
    padded = np.zeros((rows.shape[0], -(-rows.shape[1] // count) * count), dtype=np.uint32)
    padded[:, : rows.shape[1]] = rows
    words = np.zeros((rows.shape[0], padded.shape[1] // count), dtype=np.uint32)
    for index, column in enumerate(order or range(count)):
        words |= padded[:, column::count] << (bits * index)
    stored = torch.from_numpy(words.view(np.int32))
    return (stored if axis == 1 else stored.t()).contiguous()


@dataclass
class Codes:
    """A weight [N, K] as integers: codes [N, K], zeros and scales [N, G], the group of each
    column."""

    bits: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: Tensor
    groups: np.ndarray

    def values(self) -> Tensor:
        """Return [N, K] fp32: (code - zero of its group) * scale of its group."""
        scales = self.scales.float().numpy()[:, self.groups]
        steps = self.codes - self.zeros[:, self.groups]
        return torch.from_numpy(steps.astype(np.float32) * scales)


def random_codes(
    n: int,
    k: int,
    bits: int = 4,
    group: int = 32,
    *,
    sym: bool = True,
    shuffle: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Codes:
    """Return random codes at the scale of trained weights. shuffle: columns are in random
    groups."""
    random = np.random.default_rng(seed)
    size = k if group == -1 else group
    count = -(-k // size)
    codes = random.integers(0, 2**bits, (n, k))
    middle = np.full((n, count), 2 ** (bits - 1))
    zeros = middle if sym else random.integers(0, 2**bits, (n, count))
    scales = random.uniform(0.5, 1.5, (n, count)) * 1.5 * k**-0.5 * 12**0.5 / 2**bits
    groups = np.arange(k) // size
    if shuffle:
        groups = random.permutation(groups)
    return Codes(bits, codes, zeros, torch.from_numpy(scales).to(dtype), groups)


def gptq(c: Codes, less: int = 1, g_idx: bool = True) -> dict[str, Tensor]:
    """Return a module's tensors as GPTQ writes them.

    less: subtracted from each zero point of a word, 1 in version 1, 0 in version 2.
    """
    item = np.uint32(less * sum(1 << bit for bit in range(0, 32, c.bits)))
    stored = pack_words(c.zeros.T, c.bits, axis=1).numpy().view(np.uint32) - item
    result = {
        "qweight": pack_words(c.codes.T, c.bits, axis=0),
        "qzeros": torch.from_numpy(stored.view(np.int32)),
        "scales": c.scales.t().contiguous(),
    }
    if g_idx:
        result["g_idx"] = torch.from_numpy(c.groups.astype(np.int32))
    return result


def awq(c: Codes) -> dict[str, Tensor]:
    """Return a module's tensors as AWQ writes them."""
    return {
        "qweight": pack_words(c.codes.T, 4, axis=1, order=AWQ_ORDER),
        "qzeros": pack_words(c.zeros.T, 4, axis=1, order=AWQ_ORDER),
        "scales": c.scales.t().contiguous(),
    }


Pick = Callable[[str, int, int], Codes | None]


@dataclass
class Pair:
    """Folders of a quantized checkpoint and of the dense one with its values."""

    quantized: Path
    dense: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)


def write(
    folder: Path,
    dense: dict[str, Tensor],
    config: Path,
    settings: dict[str, Any],
    pick: Pick,
    serialize: Callable[[Codes], dict[str, Tensor]],
) -> Pair:
    """Write a checkpoint in which each module with codes is quantized, and one with the values of
    these codes.

    dense: the tensors of a whole model; config: a folder with its other files; settings: the
    quantization_config.
    pick(name, n, k): the codes of a module, None for one that stays dense. serialize: codes ->
    tensors.
    """
    pair = Pair(folder / "packed", folder / "plain")
    values: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        module = name.removesuffix(".weight")
        matrix = name.endswith(".weight") and tensor.dim() == 2
        codes = pick(module, *tensor.shape) if matrix else None
        if codes is None:
            pair.tensors[name] = values[name] = tensor.clone().contiguous()
            continue
        pair.tensors |= {f"{module}.{suffix}": part for suffix, part in serialize(codes).items()}
        values[name] = codes.values()
    for path, tensors in ((pair.quantized, pair.tensors), (pair.dense, values)):
        path.mkdir(parents=True)
        copy_files(config, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    set_config(pair.quantized, quantization_config=settings)
    return pair


def copy_files(source: Path, target: Path) -> None:
    """Copy all files but the weights."""
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)


def set_config(folder: Path, **settings: Any) -> None:
    """Change settings of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def names_in(name: str, parts: Iterable[str]) -> bool:
    """Return True if one of the parts is in the name."""
    return any(part in name for part in parts)
