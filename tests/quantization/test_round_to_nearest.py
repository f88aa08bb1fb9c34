"""Dense checkpoints that are quantized while loading."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep import LLM
from lockstep.errors import CheckpointError, ConfigError
from lockstep.quantization import read_weight_format
from tests.models.random_checkpoint import MTP, answer, build, weights_of
from tests.quantization.disk import copy_files, set_config
from tests.tiny_model import CONFIG, make_model

DENSE_PARTS = (
    "norm",
    "embed",
    "lm_head",
    "in_proj_a",
    "in_proj_b",
    "conv1d",
    "A_log",
    "dt_bias",
    "mtp.",
)


def round_weight(weight: Tensor, method: str) -> Tensor:
    """Return weight [N, K] quantized and dequantized row by row, in fp32."""
    n, k = weight.shape
    wide = weight.float().numpy()
    out = np.zeros((n, k), dtype=np.float32)
    if method == "fp8":
        for row in range(n):
            scale = np.float32(np.abs(wide[row]).max()) / np.float32(448)
            codes = torch.from_numpy(wide[row] / scale).to(torch.float8_e4m3fn).float().numpy()
            out[row] = codes * scale
        return torch.from_numpy(out)
    maximum, group = (127, k) if method == "int8" else (7, 128)
    for row in range(n):
        for begin in range(0, k, group):
            part = wide[row, begin : begin + group]
            exact = torch.tensor(np.abs(part).max() / np.float32(maximum))
            scale = np.float32(exact.to(weight.dtype).float())
            steps = np.clip(np.rint(part / scale), -maximum - 1, maximum)
            out[row, begin : begin + group] = steps * scale
    return torch.from_numpy(out)


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a hybrid's folder in bfloat16, with its draft module."""
    sizes = {"hidden_size": 144, "intermediate_size": 40, "num_attention_heads": 2}
    folder = make_model(tmp_path_factory.mktemp("plain"), CONFIG, **sizes)
    llm = build(folder, load_format="dummy", speculative_config=MTP, dtype="bfloat16")
    save_file(weights_of(llm), folder / "model.safetensors")
    return folder


@pytest.mark.default_cases("int8")
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_answers_equal_rounded_weights(dense_folder: Path, tmp_path: Path, method: str) -> None:
    llm = LLM(
        str(dense_folder),
        quantization=method,
        max_model_len=128,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        speculative_config=MTP,
    )
    tensors = weights_of(build(dense_folder, speculative_config=MTP))
    expected = {
        name: x
        if x.dim() != 2 or any(part in name for part in DENSE_PARTS)
        else round_weight(x.bfloat16(), method)
        for name, x in tensors.items()
    }
    copy_files(dense_folder, tmp_path)
    save_file(expected, tmp_path / "model.safetensors")
    assert answer(llm) == answer(build(tmp_path)) != answer(build(dense_folder))
    name = {"fp8": "fp8-channel", "int8": "int8-channel", "int4": "int4-g128"}[method]
    assert llm.engine.plan.quantization == name
    assert f"/weights-float32+{name}/" in llm.engine.numerics
    choices = llm.engine.explain()["layers"]
    quantized = {choice["layer"] for choice in choices if choice["storage_format"]}
    assert quantized == {f"layers.{i}" for i in range(4)}


def test_dense_checkpoint_reports_no_quantization(dense_folder: Path) -> None:
    llm = build(dense_folder)
    assert "/weights-float32/" in llm.engine.numerics and llm.engine.plan.quantization is None
    assert not any(choice["storage_format"] for choice in llm.engine.explain()["layers"])


@pytest.mark.default_cases("int4")
@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_dummy_weights_can_be_quantized(dense_folder: Path, method: str) -> None:
    settings: dict[str, Any] = {"load_format": "dummy", "quantization": method}
    assert answer(build(dense_folder, **settings)) == answer(
        build(dense_folder, **settings, speculative_config=MTP)
    )


@pytest.mark.parametrize("method", ["int3", "gptq", "", "FP8"])
def test_unknown_online_quantization_is_refused(dense_folder: Path, method: str) -> None:
    with pytest.raises(ConfigError, match="quantization=.*allowed: 'fp8', 'int8', 'int4' or None"):
        build(dense_folder, quantization=method)


def test_quantized_checkpoint_refuses_other_formats() -> None:
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
    for method in ("auto-round", "auto_round", "intel/auto-round", None):
        assert read_weight_format(settings, method) is not None
    for other in ("int4", "fp8", "gptq", "int3"):
        with pytest.raises(ConfigError, match="quantized already, as auto-round") as caught:
            read_weight_format(settings, other)
        assert "allowed: 'auto-round' or None" in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_weights_are_refused(dense_folder: Path, tmp_path: Path, value: float) -> None:
    tensors = weights_of(build(dense_folder, speculative_config=MTP))
    name = "model.layers.3.self_attn.o_proj.weight"
    tensors[name][1, 2] = value
    copy_files(dense_folder, tmp_path)
    set_config(tmp_path, mtp_num_hidden_layers=1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.o_proj\.weight has inf"):
        build(tmp_path, quantization="int8")
