"""What is asked: prompts crossed with sampling parameters, and answers as bits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check.matrix import LONG_PROMPT
from lockstep.example_prompts import long_prompt, short_prompts
from lockstep.llm import LLM
from lockstep.outputs import Logprob, RequestMetrics
from lockstep.sampling_params import SamplingParams

LONG = "long"
PREFIX_TAIL = 5

Bits = tuple[tuple[tuple[int, str, int], ...], ...]
"""Of every position the token ids, their log-probabilities bit for bit, and their ranks."""


@dataclass(frozen=True)
class Ask:
    """One request of the check. name: prompt and sampling; sampling: the name of its parameters."""

    name: str
    sampling: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """One completion. digests: of all bits of the logits in front of each token, where they were
    watched; ending: finish and stop reason; prompt_bits: log-probabilities of the prompt's tokens.
    """

    tokens: tuple[int, ...]
    bits: Bits
    metrics: RequestMetrics
    digests: tuple[int, ...] = ()
    ending: tuple[str | None, int | str | None] = (None, None)
    text: str = ""
    prompt_bits: Bits = ()

    def first_difference(self, other: "Answer", begun: bool = False) -> tuple[int, str] | None:
        """Index of the first output position that differs, and what differs there; None if none.

        begun: this one was ended from outside, so that it is the beginning of the other.
        """
        for index, pair in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if pair[0] != pair[1]:
                return index, f"token {pair[0]} instead of {pair[1]}"
            found, due = (a.bits[index : index + 1] for a in (self, other))
            if found != due:
                return index, f"logprobs {found} instead of {due}"
            if self.digests[index : index + 1] != other.digests[index : index + 1]:
                return index, "the bits of the logits differ"
        if self.prompt_bits and self.prompt_bits != other.prompt_bits:
            return 0, _prompt_difference(self.prompt_bits, other.prompt_bits)
        return self._differs_in_the_end(other, begun)

    def _differs_in_the_end(self, other: "Answer", begun: bool) -> tuple[int, str] | None:
        """What differs where all tokens that both have are equal."""
        least = min(len(self.tokens), len(other.tokens))
        found, due = ((len(a.tokens), *a.ending) for a in (self, other))
        if found != due and not (begun and found[0] <= due[0]):
            return least, f"{found[0]} tokens, {found[1:]} instead of {due[0]} tokens, {due[1:]}"
        if begun:
            return None
        if len(self.prompt_bits) != len(other.prompt_bits):
            return 0, _prompt_difference(self.prompt_bits, other.prompt_bits)
        if self.text != other.text:
            return max(least - 1, 0), f"the text {self.text!r} instead of {other.text!r}"
        return None


def _prompt_difference(found: Bits, due: Bits) -> str:
    """What differs in the log-probabilities of the prompt's tokens."""
    if len(found) != len(due):
        return f"{len(found)} prompt logprobs instead of {len(due)}"
    index = next(i for i, pair in enumerate(zip(found, due, strict=True)) if pair[0] != pair[1])
    return f"prompt logprobs of token {index + 1}: {found[index]} instead of {due[index]}"


def as_bits(logprobs: Sequence[dict[int, Logprob] | None] | None) -> Bits:
    """Log-probabilities as what can be compared; the first prompt token has none."""
    return tuple(
        tuple((token, e.logprob.hex(), e.rank) for token, e in sorted((position or {}).items()))
        for position in logprobs or ()
    )


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
        metrics, bits = output.metrics, as_bits(done.logprobs)
        answers.append(Answer(tuple(done.token_ids), bits, metrics))
    return answers


def prime(llm: LLM, asks: list[Ask]) -> None:
    """Puts the prompts' beginnings into the prefix cache, by asking something else about them."""
    once = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    prompts = dict.fromkeys(a.prompt for a in asks)
    llm.generate([{"prompt_token_ids": list(p[:-PREFIX_TAIL])} for p in prompts], once)
