"""Against transformers on the same checkpoint, in fp32: logits and greedy tokens."""

from pathlib import Path

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.engine.setup import find_model

BUNDLED = find_model(None)
RELATIVE = 2e-4
TIE = 1e-5


@pytest.fixture(scope="module")
def oracle():
    """The bundled model in transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The bundled model in Lockstep, drafting."""
    return LLM(
        speculative_config={"method": "mtp", "num_speculative_tokens": 3}, max_model_len=4096
    )


def prompts(count: int, longest: int) -> list[list[int]]:
    """Token ids of sources, from 16 tokens to `longest`."""
    text = Path(torch.__file__).read_text()
    ids = bundled_ids(text)
    lengths = torch.linspace(16, longest, count).long().tolist()
    return [ids[i * 37 : i * 37 + n] for i, n in enumerate(lengths)]


def bundled_ids(text: str) -> list[int]:
    """Token ids of a text in the bundled tokenizer."""
    from lockstep.text.tokenizer import Tokenizer

    return Tokenizer(BUNDLED).encode(text)


def logits_error(llm: LLM, oracle: torch.nn.Module, ids: list[int]) -> float:
    """Relative norm of the difference of log-probabilities over a prompt's own tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    out = llm.generate({"prompt_token_ids": ids}, params)[0]
    assert out.prompt_logprobs is not None
    ours = torch.tensor(
        [e[t].logprob for e, t in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
    )
    with torch.no_grad():
        theirs = torch.log_softmax(oracle(torch.tensor([ids])).logits[0].float(), -1)
    chosen = theirs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return float((ours - chosen).norm() / chosen.norm())


def compare_greedy(llm: LLM, oracle: torch.nn.Module, ids: list[int], count: int) -> int:
    """Fails where a greedy token differs and is no tie; returns how many ties there were."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    tokens = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
    assert len(tokens) == count
    with torch.no_grad():
        logits = oracle(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
    best = logits.max(-1).values
    ties = 0
    for i, token in enumerate(tokens):
        gap = float(best[i] - logits[i, token])
        assert gap <= TIE, f"token {i}: {gap} below the oracle's best"
        ties += gap > 0
    return ties


@pytest.mark.parametrize("longest", [200])
def test_logits_and_greedy_tokens_of_a_few_prompts(llm: LLM, oracle, longest: int) -> None:
    for ids in prompts(3, longest):
        assert logits_error(llm, oracle, ids) < RELATIVE
        compare_greedy(llm, oracle, ids, 20)


@pytest.mark.slow
def test_logits_and_greedy_tokens_of_64_prompts(llm: LLM, oracle) -> None:
    worst, ties = 0.0, 0
    for ids in prompts(64, 3000):
        worst = max(worst, logits_error(llm, oracle, ids))
        ties += compare_greedy(llm, oracle, ids, 200)
    print(f"worst relative error {worst:.2e}, ties {ties}")
    assert worst < RELATIVE
