"""The bundled model equals transformers in fp32: logits and greedy tokens."""

from pathlib import Path

import pytest
import torch

from lockstep import LLM
from lockstep.worker.build import find_model
from tests.models.oracle import RELATIVE, compare_greedy, logits_error

BUNDLED = find_model(None)


@pytest.fixture(scope="module")
def oracle():
    """Return the bundled model in transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Return the bundled model in Lockstep, with drafts."""
    return LLM(
        speculative_config={"method": "mtp", "num_speculative_tokens": 3}, max_model_len=4096
    )


def prompts(count: int, longest: int) -> list[list[int]]:
    """Return `count` prompts of source code as token ids, from 16 tokens to `longest`."""
    text = Path(torch.__file__).read_text()
    ids = bundled_ids(text)
    lengths = torch.linspace(16, longest, count).long().tolist()
    return [ids[i * 37 : i * 37 + n] for i, n in enumerate(lengths)]


def bundled_ids(text: str) -> list[int]:
    """Return token ids of a text in the bundled tokenizer."""
    from lockstep.text.tokenizers.tokenizer import Tokenizer

    return Tokenizer(BUNDLED).encode(text)


@pytest.mark.parametrize("longest", [200])
def test_equals_transformers(llm: LLM, oracle, longest: int) -> None:
    for ids in prompts(3, longest):
        assert logits_error(llm, oracle, ids) < RELATIVE
        compare_greedy(llm, oracle, ids, 20)


@pytest.mark.slow
def test_64_prompts_equal_transformers(llm: LLM, oracle) -> None:
    worst = 0.0
    ties = 0
    for ids in prompts(64, 3000):
        worst = max(worst, logits_error(llm, oracle, ids))
        ties += compare_greedy(llm, oracle, ids, 200)
    print(f"worst relative error {worst:.2e}, ties {ties}")
    assert worst < RELATIVE
