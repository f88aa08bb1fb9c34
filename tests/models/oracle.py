"""Lockstep against transformers on one checkpoint, in fp32: logits and greedy tokens."""

import torch

from lockstep import LLM, SamplingParams

RELATIVE = 2e-4
TIE = 1e-5


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
    return compare_tokens(oracle, ids, tokens)


def compare_tokens(oracle: torch.nn.Module, ids: list[int], tokens: list[int]) -> int:
    """Fails where one of the greedy tokens behind a prompt differs and is no tie; returns how many
    ties there were."""
    with torch.no_grad():
        logits = oracle(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
    best = logits.max(-1).values
    ties = 0
    for i, token in enumerate(tokens):
        gap = float(best[i] - logits[i, token])
        assert gap <= TIE, f"token {i}: {gap} below the oracle's best"
        ties += gap > 0
    return ties
