"""Accumulators of output deltas."""

from lockstep.outputs import Logprob
from lockstep.serve.requests.accumulators import CompletionAccumulator
from lockstep.serve.requests.active_request import OutputDelta, Usage
from lockstep.text.processor import TextUpdate


def delta_of(text: str, token: int) -> OutputDelta:
    """Return a delta of one token with a log-probability."""
    entry = {token: Logprob(-1.0, 1, text)}
    update = TextUpdate(texts=(text,), token_ids=(token,), logprobs=(entry,))
    return OutputDelta(0, update, Usage(1), sources=("plain",))


def test_lists_grow_in_place_until_they_are_sent() -> None:
    """A copy for every token would take seconds for a long answer. What was sent stays."""
    completion = CompletionAccumulator()
    completion.add(delta_of("a", 5))
    logprobs = completion.logprobs
    completion.add(delta_of("b", 6))
    assert completion.logprobs is logprobs and logprobs is not None
    assert [list(entry) for entry in logprobs] == [[5], [6]]
    assert completion.text == "ab" and completion.token_ids == [5, 6]
    completion.clear()
    completion.add(delta_of("c", 7))
    assert len(logprobs) == 2 and completion.token_ids == [7]
