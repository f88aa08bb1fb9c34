"""The judge of texts accepts what tokens spell, and names wrong texts, stop strings and sums."""

from typing import Any

import pytest

from lockstep.check.judges.texts import wrong_scores, wrong_text
from lockstep.outputs import CompletionOutput, Logprob
from lockstep.sampling_params import SamplingParams
from lockstep.text.tokenizers.tokenizer import Tokenizer
from lockstep.worker.build import find_model

TEXT = "the harbour was quiet that morning"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_model(None))


def output(tokenizer: Tokenizer, text: str, tokens_of: str = TEXT, **ending: Any) -> Any:
    token_ids = tokenizer.encode(tokens_of, add_special_tokens=False)
    return CompletionOutput(text=text, token_ids=token_ids, **{"finish_reason": "length", **ending})


def test_text_is_that_of_all_tokens(tokenizer: Tokenizer) -> None:
    params = SamplingParams()
    assert wrong_text(tokenizer, output(tokenizer, TEXT), params) is None
    assert "instead of" in str(wrong_text(tokenizer, output(tokenizer, TEXT[:-1]), params))
    ids_only = SamplingParams(detokenize=False)
    assert wrong_text(tokenizer, output(tokenizer, ""), ids_only) is None
    assert "without detokenization" in str(wrong_text(tokenizer, output(tokenizer, "a"), ids_only))


def test_token_that_ends_an_answer_has_no_text(tokenizer: Tokenizer) -> None:
    last = tokenizer.encode(TEXT, add_special_tokens=False)[-1]
    shown = tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)[:-1])
    ending = {"finish_reason": "stop", "stop_reason": last}
    params = SamplingParams(stop_token_ids=[last])
    assert wrong_text(tokenizer, output(tokenizer, shown, **ending), params) is None
    assert "instead of" in str(wrong_text(tokenizer, output(tokenizer, TEXT, **ending), params))


@pytest.mark.parametrize(
    ("text", "tokens_of", "reason", "options", "fault"),
    [
        ("the harbour was ", "the harbour was quiet", "quiet", {}, None),
        ("the harbour was quiet", "the harbour was quiet", "quiet", {"include": True}, None),
        ("the harbour was quiet", "the harbour was quiet", "quiet", {}, "before the stop string"),
        ("the harbour was quiet", "the harbour was quiet", None, {}, "went on after the stop"),
        ("the harbour", "the harbour", "quiet", {}, "which 'the harbour' lacks"),
        ("the harbour was ", TEXT, "quiet", {}, "a token came after the stop string"),
        ("the harbour was quiet", "the harbour was quiet", None, {"min_tokens": 40}, None),
        ("the ", "the harbour", "harbour", {"stop": ["quiet", "harbour"]}, None),
        (
            "the harbour was ",
            "the harbour was quiet",
            "quiet",
            {"stop": ["quiet", "harbour"]},
            "ended at 'quiet' instead of 'harbour'",
        ),
        ("the harbour was ", "the harbour was quiet", "quiet", {"stop": ["iet", "quiet"]}, None),
        (
            "the harbour was qu",
            "the harbour was quiet",
            "iet",
            {"stop": ["iet", "quiet"]},
            "ended at 'iet' instead of 'quiet'",
        ),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer,
    text: str,
    tokens_of: str,
    reason: str | None,
    options: dict[str, Any],
    fault: str | None,
) -> None:
    params = SamplingParams(
        stop=options.get("stop", ["quiet"]),
        max_tokens=50,
        min_tokens=options.get("min_tokens", 0),
        include_stop_str_in_output=options.get("include", False),
    )
    ending = {"finish_reason": "stop" if reason else "length", "stop_reason": reason}
    actual = wrong_text(tokenizer, output(tokenizer, text, tokens_of, **ending), params)
    assert actual is None if fault is None else fault in str(actual)


def test_sum_and_names_of_scores(tokenizer: Tokenizer) -> None:
    def scored(total: float | None, name: str) -> CompletionOutput:
        entry = {5: Logprob(-0.5, 1, name)}
        return CompletionOutput(token_ids=[5], logprobs=[entry], cumulative_logprob=total)

    name = tokenizer.decode([5], skip_special_tokens=False)
    assert wrong_scores(tokenizer, scored(-0.5, name)) is None
    assert "cumulative_logprob -0.25" in str(wrong_scores(tokenizer, scored(-0.25, name)))
    assert "decoded_token" in str(wrong_scores(tokenizer, scored(-0.5, name + "x")))
