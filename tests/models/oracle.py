"""Compare Lockstep with transformers on one checkpoint, in fp32: logits and greedy tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep import LLM, SamplingParams
from lockstep.worker.executor import worker_of

RELATIVE = 2e-4
TIE = 1e-5


@contextmanager
def hidden_states(llm: LLM) -> Iterator[list[Tensor]]:
    """Yield the list of hidden states [T, H] of each step's first request, which grows with the
    steps."""
    seen: list[Tensor] = []

    def see(module: Any, arguments: Any, output: Any) -> None:
        first, last = arguments[0].cu_seqlens[:2].tolist()
        seen.append(output[0][first:last].clone())

    handle = worker_of(llm.engine).model.register_forward_hook(see)
    try:
        yield seen
    finally:
        handle.remove()


def logits_error(llm: LLM, oracle: torch.nn.Module, ids: list[int]) -> float:
    """Return the largest relative error of a prompt's logits."""
    return float(logits_errors(llm, oracle, ids).max())


def logits_errors(llm: LLM, oracle: torch.nn.Module, ids: list[int]) -> Tensor:
    """Return the relative error of the logits at every position of a prompt [N].

    Also assert that the request's log-probabilities are those of these logits.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with hidden_states(llm) as seen:
        out = llm.generate({"prompt_token_ids": ids}, params)[0]
    with torch.inference_mode():
        ours = worker_of(llm.engine).model.head(torch.cat(seen)).float()
        theirs = oracle(torch.tensor([ids])).logits[0].float()
    assert ours.shape == theirs.shape
    assert out.prompt_logprobs is not None
    received = [e[t].logprob for e, t in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
    chosen = torch.log_softmax(ours, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.allclose(torch.tensor(received), chosen, rtol=1e-5, atol=1e-5)
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def compare_greedy(llm: LLM, oracle: torch.nn.Module, ids: list[int], count: int) -> int:
    """Assert that greedy tokens equal the oracle's except for ties; return the number of ties."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    tokens = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
    assert len(tokens) == count
    return compare_tokens(oracle, ids, tokens)


def compare_tokens(oracle: torch.nn.Module, ids: list[int], tokens: list[int]) -> int:
    """Assert that the greedy tokens after a prompt equal the oracle's except for ties; return the
    number of ties."""
    with torch.no_grad():
        logits = oracle(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
    best = logits.max(-1).values
    ties = 0
    for i, token in enumerate(tokens):
        gap = float(best[i] - logits[i, token])
        assert gap <= TIE, f"token {i}: {gap} below the oracle's best"
        ties += gap > 0
    return ties
