"""Scores: requests that force a given answer, for its log-probabilities."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lockstep.errors import ComputeError, RequestError, brief
from lockstep.outputs import RequestOutput, ScoreOutput
from lockstep.sampling_params import SamplingParams, is_ids, is_list
from lockstep.text.processor import Processor

Answer = str | Sequence[int]
"""Answer to score: a text, or token ids."""
GREEDY = SamplingParams(temperature=0.0)
"""Sampling parameters of scores where the caller gives none."""


def answer_ids(processor: Processor, answer: Answer) -> list[int]:
    """Return the token ids of an answer. Raises RequestError."""
    ids = processor.encode(answer, False, "answers") if isinstance(answer, str) else answer
    if not is_list(ids) or not is_ids(ids):
        raise RequestError(
            f"answers has {brief(answer)}; allowed: a text, or a list of token ids. Send one of "
            "them.",
            "answers",
        )
    if not ids:
        raise RequestError(
            "answers has an answer of 0 tokens; allowed: 1 token or more. Leave it out.", "answers"
        )
    return list(ids)


def answer_list(answers: Answer | Sequence[Answer]) -> list[Any]:
    """Return one answer or several as a list."""
    if isinstance(answers, str) or not is_list(answers):
        return [answers]
    # A list of token ids is one answer; a list of texts or of lists has several.
    return [answers] if answers and not isinstance(answers[0], (str, Sequence)) else list(answers)


def score_params(params: SamplingParams, ids: Sequence[int], logprobs: int) -> SamplingParams:
    """Return the sampling parameters of a request that forces these tokens and ends with them.

    params: those of the answer; they decide which token would have been chosen. Raises
    RequestError.
    """
    for name in ("structured_outputs", "thinking_token_budget", "forced_token_ids"):
        if getattr(params, name) is not None:
            raise RequestError(
                f"sampling_params has {name}; allowed in score(): parameters of the sampler. Leave "
                "it out.",
                name,
            )
    return replace(
        params,
        n=1,
        max_tokens=len(ids),
        min_tokens=min(params.min_tokens, len(ids)),
        # No token ends an answer that is given.
        ignore_eos=True,
        stop=None,
        stop_token_ids=None,
        prompt_logprobs=None,
        logprobs=logprobs,
        detokenize=False,
        forced_token_ids=ids,
        forced_mismatch="report",
    )


def score_output(output: RequestOutput) -> ScoreOutput:
    """Return the score that the output of such a request contains.

    Raises ComputeError where the request ended before the answer's end.
    """
    completion = output.outputs[0]
    if completion.finish_reason != "length":
        raise ComputeError(
            f"the score ended after {len(completion.token_ids)} tokens of the answer: "
            f"{completion.error or 'its request was aborted'}. Ask again."
        )
    return ScoreOutput(
        prompt_token_ids=output.prompt_token_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs or [],
        cumulative_logprob=completion.cumulative_logprob or 0.0,
        forced_mismatch=output.metrics.forced_mismatch,
        metrics=output.metrics,
    )


@contextmanager
def naming_answers() -> Iterator[None]:
    """Name the caller's argument in errors about the forced tokens that are made of it."""
    try:
        yield
    except RequestError as error:
        if error.field != "forced_token_ids":
            raise
        message = str(error).replace("forced_token_ids", "answers")
        raise RequestError(message, "answers") from None
