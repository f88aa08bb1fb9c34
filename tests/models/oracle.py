"""Lockstep against transformers on one checkpoint, in fp32: logits and greedy tokens."""

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
    """The hidden states [T, H] of each step's first request, as the steps come."""
    seen: list[Tensor] = []

    def see(module: Any, given: Any, output: Any) -> None:
        first, last = given[0].cu_seqlens[:2].tolist()
        seen.append(output[0][first:last].clone())

    handle = worker_of(llm.engine).model.register_forward_hook(see)
    try:
        yield seen
    finally:
        handle.remove()


def logits_error(llm: LLM, oracle: torch.nn.Module, ids: list[int]) -> float:
    """The relative error of a prompt's logits at its worst position."""
    return float(logits_errors(llm, oracle, ids).max())


def logits_errors(llm: LLM, oracle: torch.nn.Module, ids: list[int]) -> Tensor:
    """At every position of a prompt, the norm of the difference of its logits to the oracle's, to
    theirs [N]. The log-probabilities that a request for them gets are those of these logits."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with hidden_states(llm) as seen:
        out = llm.generate({"prompt_token_ids": ids}, params)[0]
    with torch.inference_mode():
        ours = worker_of(llm.engine).model.head(torch.cat(seen)).float()
        theirs = oracle(torch.tensor([ids])).logits[0].float()
    assert ours.shape == theirs.shape
    assert out.prompt_logprobs is not None
    told = [e[t].logprob for e, t in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
    chosen = torch.log_softmax(ours, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.allclose(torch.tensor(told), chosen, rtol=1e-5, atol=1e-5)
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


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
