"""Judge of a completion's text, which the tokenizers library decodes from all tokens at once.

The engine decodes token by token and delays text that may begin a stop string. This judge has all
tokens, so it shares no code with the engine.
"""

import math
from collections.abc import Sequence

from lockstep.outputs import CompletionOutput, Logprob
from lockstep.sampling_params import SamplingParams
from lockstep.text.tokenizers.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SUM_TOLERANCE = 1e-9
"""Relative tolerance of a sum of log-probabilities in float64."""


def spell(tokenizer: Tokenizer, tokens: Sequence[int], params: SamplingParams) -> str:
    """Return the text of tokens, decoded at once."""
    return tokenizer.fast.decode(list(tokens), skip_special_tokens=params.skip_special_tokens)


def wrong_text(
    tokenizer: Tokenizer | None, output: CompletionOutput, params: SamplingParams
) -> str | None:
    """Return what is wrong with the text or the stop string of an ended completion, or None."""
    if tokenizer is None or not params.detokenize:
        return f"it has the text {output.text!r} without detokenization" if output.text else None
    if not tokenizer.byte_level or output.finish_reason not in ("stop", "length"):
        return None
    by_text = isinstance(output.stop_reason, str)
    ends_by_token = output.finish_reason == "stop" and not by_text
    hides_last = ends_by_token and not params.include_stop_str_in_output
    tokens = output.token_ids[: len(output.token_ids) - hides_last]
    text = spell(tokenizer, tokens, params)
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    if any(REPLACEMENT in stop for stop in stops):
        return None  # the end of a cut text has such a character that later tokens complete
    # The bytes of a character may be in tokens on both sides of min_tokens.
    unsearched = spell(tokenizer, tokens[: params.min_tokens], params).rstrip(REPLACEMENT)
    ends = {stop: text.find(stop, len(unsearched)) + len(stop) for stop in stops}
    ends = {stop: end for stop, end in ends.items() if end >= len(unsearched) + len(stop)}
    if not ends:
        if by_text:
            return f"it ended at the stop string {output.stop_reason!r}, which {text!r} lacks"
        return None if output.text == text else f"the text {output.text!r} instead of {text!r}"
    if not by_text:
        return f"it went on after the stop string {min(ends, key=ends.__getitem__)!r} of {text!r}"
    stop = str(output.stop_reason)
    if stop not in ends:
        return f"it ended at {stop!r}, which {text!r} lacks"
    # The first complete stop string ends an answer; of several, the longest.
    first = min(ends, key=lambda one: (ends[one], -len(one)))
    if stop != first:
        return f"it ended at {stop!r} instead of {first!r} of {text!r}"
    expected = text[: ends[stop] - (0 if params.include_stop_str_in_output else len(stop))]
    if output.text != expected:
        return f"the text {output.text!r} instead of {expected!r} before the stop string {stop!r}"
    earlier = spell(tokenizer, tokens[:-1], params)
    if len(tokens) > params.min_tokens and stop in earlier[len(unsearched) :]:
        return f"a token came after the stop string {stop!r} of {earlier!r}"
    return None


def wrong_scores(tokenizer: Tokenizer | None, output: CompletionOutput) -> str | None:
    """Return what is wrong with the texts or the sum of the log-probabilities, or None."""
    if output.logprobs is None:
        if output.cumulative_logprob is None:
            return None
        return "it has a sum of log-probabilities that the request did not ask for"
    if len(output.logprobs) != len(output.token_ids):
        return f"{len(output.logprobs)} log-probabilities for {len(output.token_ids)} tokens"
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    total = math.fsum(entry[token].logprob for token, entry in pairs)
    actual = output.cumulative_logprob
    if actual is None or abs(actual - total) > SUM_TOLERANCE * (1 + abs(total)):
        return f"cumulative_logprob {actual} instead of {total}"
    return wrong_names(tokenizer, output.logprobs)


def wrong_names(tokenizer: Tokenizer | None, logprobs: Sequence[dict[int, Logprob]]) -> str | None:
    """Return the first decoded_token that its token does not spell, or None."""
    if tokenizer is None:
        return None
    for entry in logprobs:
        for token, score in entry.items():
            text = tokenizer.fast.decode([token], skip_special_tokens=False)
            if score.decoded_token != text:
                return f"decoded_token {score.decoded_token!r} of token {token}, {text!r}"
    return None
