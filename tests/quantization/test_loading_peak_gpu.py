"""Loading needs no more GPU memory than the model and one file of weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model, fill_dummy, load_weights
from lockstep.quantization import read_weight_format
from lockstep.worker.build import prepare_device
from tests.quantization.disk import Codes, awq, gptq, random_codes, write
from tests.tiny_model import QWEN3

pytestmark = pytest.mark.gpu

RAW = {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
       "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
       "vocab_size": 2048}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FILE_BYTES = 48 << 20
"""Maximum bytes of a file of weights."""
CHUNK_NUMEL = 1 << 19
"""Elements that are repacked at once, of 12 million in the largest weight. Each needs about 20
bytes; with the usual 16 million at once that is 340 MB, less than a file of published weights."""


def plain_weights() -> dict[str, Tensor]:
    """Return random weights by their names in a checkpoint."""
    build = BuildContext("cpu", torch.bfloat16, 1, 64)
    model: Any = build_model(RAW, build)
    fill_dummy(model, None, 0, build)
    names = {n if n == "lm_head.weight" else f"model.{n}": t for n, t in model.weights().items()}
    return {name: tensor.detach().contiguous().clone() for name, tensor in names.items()}


def save(folder: Path, tensors: dict[str, Tensor]) -> int:
    """Save the tensors in files of at most FILE_BYTES; return the bytes of the largest."""
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = tensor
    for index, tensors_of_file in enumerate(files):
        save_file(tensors_of_file, folder / f"model-{index}.safetensors")
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def pick(name: str, n: int, k: int) -> Codes | None:
    """Return codes of all modules but embedding and head."""
    if "embed" in name or "head" in name:
        return None
    return random_codes(n, k, 4, 128, sym=False, seed=len(name))


@pytest.mark.parametrize(
    ("settings", "serialize", "online"),
    [
        (GPTQ, partial(gptq, g_idx=False), None),
        (AWQ, awq, None),
        (None, None, None),
        (None, None, "int4"),
        (None, None, "fp8"),
    ],
    ids=["gptq", "awq", "plain", "quantized to int4", "quantized to fp8"],
)
def test_loading_peak_is_model_plus_one_file(
    tmp_path: Path,
    settings: dict[str, Any] | None,
    serialize: Callable[[Codes], dict[str, Tensor]] | None,
    online: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.kernels.formats.weights.quantized_weight.CHUNK", CHUNK_NUMEL)
    tensors = plain_weights()
    if settings is not None and serialize is not None:
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "config.json").write_text("{}")
        tensors = write(tmp_path, tensors, tmp_path / "config", settings, pick, serialize).tensors
    folder = tmp_path / "model"
    folder.mkdir()
    largest = save(folder, tensors)
    raw = RAW if settings is None else {**RAW, "quantization_config": settings}
    checkpoint = Checkpoint(folder, raw)
    weight_format = read_weight_format(checkpoint.quantization(), online)
    prepare_device("cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    build = BuildContext(
        "cuda", torch.bfloat16, 1, 64,
        tensors=checkpoint.tensors(), prefixes=checkpoint.prefixes, weight_format=weight_format,
    )  # fmt: skip
    model = build_model(raw, build)
    load_weights(checkpoint, model, None, lambda done, of: None, weight_format)
    size = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert size <= stored * 1.05 + (1 << 20), "quantized weights stay quantized"
    assert peak <= size + largest, (peak, size, largest)
