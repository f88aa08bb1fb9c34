"""Requests of the matrix: prompts with sampling parameters, and batches of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lockstep.check.matrix.setups import LONG_PROMPT, long_prompt_length
from lockstep.example_prompts import long_prompt, short_prompts
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams

T = TypeVar("T")
LONG = "long"
"""Name of the long prompt's sampling parameters."""
PREFIX_TAIL = 5
"""Last tokens of a prompt that are not cached before a prefix hit."""


@dataclass(frozen=True)
class Case:
    """Request of the matrix. name: prompt and parameters; sampling: name of the parameters.

    params: excluded from the hash because it is mutable; the name identifies it.
    """

    name: str
    sampling: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(hash=False)


@dataclass(frozen=True)
class Batch:
    """Cases that run together.

    chunk: max_num_batched_tokens, None for the engine's own. warm_prefixes: cache the prompts'
    prefixes first.
    """

    name: str
    cases: tuple[Case, ...]
    chunk: int | None = None
    warm_prefixes: bool = False


def sampling_params_by_name(
    max_tokens: int, frequent_tokens: list[int]
) -> dict[str, SamplingParams]:
    """Return sampling parameters by name. frequent_tokens: tokens to be biased and banned."""
    # ignore_eos: a fixed number of tokens, so that a difference is not hidden by an early end.
    base = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, detokenize=False
    )
    sampled = replace(base, temperature=0.9, seed=20261)
    penalty: dict[str, Any] = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    return {
        "greedy": base,
        "sampled": sampled,
        "penalties": replace(base, repetition_penalty=1.2, **penalty),
        "min_p": replace(sampled, min_p=0.08, seed=-7),
        "top_k, top_p": replace(sampled, temperature=1.3, top_k=40, top_p=0.9, seed=5),
        "logit_bias": replace(
            sampled,
            logit_bias={
                frequent_tokens[0]: -3.0,
                frequent_tokens[1]: 2.5,
                frequent_tokens[-1]: -100.0,
            },
            seed=11,
        ),
        "bad_words": replace(
            base, bad_words_ids=[[frequent_tokens[0]], frequent_tokens[1:3]], min_tokens=max_tokens
        ),
    }


def make_cases(plain: LLM, max_tokens: int) -> list[Case]:
    """Return seven short prompts with different parameters, and a long one."""
    prompts = [tuple(p) for p in short_prompts(plain)]
    probe = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    greedy_outputs = plain.generate(
        [{"prompt_token_ids": list(p)} for p in prompts], probe, use_tqdm=False
    )
    counts = Counter(token for output in greedy_outputs for token in output.outputs[0].token_ids)
    frequent_tokens = [token for token, _ in counts.most_common(6)] + list(prompts[0][:4])
    params_by_name = sampling_params_by_name(max_tokens, frequent_tokens)
    short = [
        Case(f"prompt {i + 1}, {name}", name, prompt, params)
        for i, (prompt, (name, params)) in enumerate(
            zip(prompts, params_by_name.items(), strict=True)
        )
    ]
    length = long_prompt_length(plain.engine.plan.device, LONG_PROMPT)
    long_tokens = tuple(long_prompt(plain, length))
    return [*short, Case("long prompt, sampled", LONG, long_tokens, params_by_name["sampled"])]


def prefixes_to_cache(cases: tuple[Case, ...]) -> list[tuple[int, ...]]:
    """Return the distinct prefixes of the prompts that are cached before a prefix hit."""
    prompts = dict.fromkeys(case.prompt for case in cases)
    return [prompt[:-PREFIX_TAIL] for prompt in prompts]


def cyclic_slice(items: Sequence[T], count: int, index: int) -> list[T]:
    """Return `count` consecutive items of the repeated sequence, beginning at count * index."""
    return [items[(index * count + i) % len(items)] for i in range(count)]
