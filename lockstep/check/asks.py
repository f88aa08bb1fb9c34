"""What is asked: prompts crossed with sampling parameters, and answers as bits."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check.matrix import LONG_PROMPT
from lockstep.llm import LLM
from lockstep.outputs import RequestMetrics
from lockstep.samples import long_prompt, short_prompts
from lockstep.sampling_params import SamplingParams

LONG = "long"
PREFIX_TAIL = 5


@dataclass(frozen=True)
class Ask:
    """One request of the check. name: prompt and sampling; sampling: the name of its parameters."""

    name: str
    sampling: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """tokens, and of every position the log-probabilities, bit for bit, by token id."""

    tokens: tuple[int, ...]
    bits: tuple[tuple[tuple[int, str], ...], ...]
    metrics: RequestMetrics

    def first_difference(self, other: "Answer") -> tuple[int, str] | None:
        """Index of the first output position that differs, and what differs there; None if none."""
        for index, pair in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if pair[0] != pair[1]:
                return index, f"token {pair[0]} instead of {pair[1]}"
            if self.bits[index] != other.bits[index]:
                return index, f"logprobs {self.bits[index]} instead of {other.bits[index]}"
        if len(self.tokens) != len(other.tokens):
            short = min(len(self.tokens), len(other.tokens))
            return short, f"{len(self.tokens)} tokens instead of {len(other.tokens)}"
        return None


def samplings(max_tokens: int, usual: list[int]) -> dict[str, SamplingParams]:
    """Every way to sample, by name. `usual`: tokens that the model likes, to be biased and banned.

    A fixed number of tokens each, with logprobs, so that nothing hides behind an early end.
    """
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
            sampled, logit_bias={usual[0]: -3.0, usual[1]: 2.5, usual[-1]: -100.0}, seed=11
        ),
        "bad_words": replace(base, bad_words_ids=[[usual[0]], usual[1:3]], min_tokens=max_tokens),
    }


def make_asks(plain: LLM, max_tokens: int) -> list[Ask]:
    """Seven short prompts, each sampled its own way, and a long one: all that a check asks."""
    prompts = [tuple(p) for p in short_prompts(plain)]
    probe = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    likes = plain.generate([{"prompt_token_ids": list(p)} for p in prompts], probe)
    counted = Counter(token for output in likes for token in output.outputs[0].token_ids)
    usual = [token for token, _ in counted.most_common(6)] + list(prompts[0][:4])
    ways = samplings(max_tokens, usual)
    asks = [
        Ask(f"prompt {i + 1}, {name}", name, prompt, params)
        for i, (prompt, (name, params)) in enumerate(zip(prompts, ways.items(), strict=True))
    ]
    lengthy = tuple(long_prompt(plain, LONG_PROMPT))
    return [*asks, Ask("long prompt, sampled", LONG, lengthy, ways["sampled"])]


def run(llm: LLM, asks: list[Ask]) -> list[Answer]:
    """Asks all of them at once."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(a.prompt)} for a in asks], [a.params for a in asks]
    )
    answers = []
    for output in outputs:
        done = output.outputs[0]
        bits = tuple(
            tuple((token, entry.logprob.hex()) for token, entry in sorted(position.items()))
            for position in done.logprobs or ()
        )
        answers.append(Answer(tuple(done.token_ids), bits, output.metrics))
    return answers


def prime(llm: LLM, asks: list[Ask]) -> None:
    """Puts the prompts' beginnings into the prefix cache, by asking something else about them."""
    once = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    prompts = dict.fromkeys(a.prompt for a in asks)
    llm.generate([{"prompt_token_ids": list(p[:-PREFIX_TAIL])} for p in prompts], once)
