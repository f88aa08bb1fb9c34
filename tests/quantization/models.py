"""Tiny transformers models with random weights, and the comparison of quantized and dense
answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep import LLM
from tests.models.dense import VOCAB, bits, generate_greedy, make_llm, prompts
from tests.models.oracle import RELATIVE, compare_greedy, logits_error
from tests.quantization.disk import Pair

TOKENS = 32
"""Tokens of each compared answer."""


def random_model(folder: Path, family: str, base: dict[str, Any], **changes: Any) -> nn.Module:
    """Return a random transformers model, saved in the folder. family: prefix of its classes, e.g.
    Qwen3."""
    transformers = pytest.importorskip("transformers")
    settings = {**base, "dtype": "float32", "vocab_size": VOCAB, **changes}
    settings.pop("torch_dtype", None)
    torch.manual_seed(0)
    kind = "Qwen3_5TextConfig" if family == "Qwen3_5" else f"{family}Config"
    config = getattr(transformers, kind)(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            parameter.data.normal_()
        elif name.endswith("A_log"):
            parameter.data.uniform_(0.0, 2.0)
        else:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder."""
    return load_file(folder / "model.safetensors")


def check_answers(pair: Pair, oracle: nn.Module | None, **settings: Any) -> LLM:
    """Assert that the quantized model's answers equal the dense one's bit for bit, and are close to
    the oracle's with the dense weights; return the quantized model."""
    small = {"max_num_seqs": 1, "max_model_len": 256}
    quantized = make_llm(pair.quantized, **small, **settings)
    dense = make_llm(pair.dense, **small)
    for ids in prompts(2, 100):
        actual = generate_greedy(quantized, ids, TOKENS)
        assert bits(actual) == bits(generate_greedy(dense, ids, TOKENS))
    if oracle is not None:
        oracle.load_state_dict(load_tensors(pair.dense), strict=False)
        ids = prompts(1, 60)[0]
        assert logits_error(quantized, oracle, ids) < RELATIVE
        compare_greedy(quantized, oracle, ids, TOKENS)
    return quantized
