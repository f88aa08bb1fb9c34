"""Tiny models of transformers with random weights, to be packed and answered with."""

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

TOKENS = 64
"""Of each answer that is compared."""


def random_model(folder: Path, family: str, base: dict[str, Any], **changes: Any) -> nn.Module:
    """A model of transformers, saved in the folder. family: its classes' name, e.g. Qwen3."""
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


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder."""
    return load_file(folder / "model.safetensors")


def same_answers(pair: Pair, oracle: nn.Module | None, **settings: Any) -> LLM:
    """Checks that the packed model's answers are the plain one's bit for bit, and the oracle's with
    the plain one's weights nearly. Returns the packed model."""
    small = {"max_num_seqs": 1, "max_model_len": 256}
    packed = make_llm(pair.packed, **small, **settings)
    plain = make_llm(pair.plain, **small)
    for ids in prompts(2, 100):
        found = generate_greedy(packed, ids, TOKENS)
        assert bits(found) == bits(generate_greedy(plain, ids, TOKENS))
    if oracle is not None:
        oracle.load_state_dict(tensors_of(pair.plain), strict=False)
        ids = prompts(1, 60)[0]
        assert logits_error(packed, oracle, ids) < RELATIVE
        compare_greedy(packed, oracle, ids, TOKENS)
    return packed
