"""The prediction drafter proposes the tokens of a request's predicted text, and changes no
answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.errors import ConfigError, RequestError
from lockstep.outputs import RequestOutput
from lockstep.spec import read
from lockstep.spec.drafter import DraftContext, Predictions
from lockstep.spec.prediction import Options, create
from lockstep.step import StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.prediction_column import PredictionColumn
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, TEXT, answer, assert_idle, make_engine

LONG = 60
PROMPT = [50, 51, 52]


def drafts_after(answer: Sequence[int], text: Sequence[int], count: int = 4) -> list[int]:
    """Return the drafts of a row with this answer and predicted text, next to the null row."""
    known = [*PROMPT, *answer]
    tokens = torch.full((2, 60), 7)
    tokens[1, : len(known)] = torch.tensor(known)
    lengths = torch.tensor([0, len(known) - 1], dtype=torch.int32)
    texts = torch.full((2, 40), 9)
    texts[1, : len(text)] = torch.tensor(text)
    text_lens = torch.tensor([0, len(text)], dtype=torch.int32)
    prompt_len = torch.tensor([0, len(PROMPT)], dtype=torch.int32)
    context = DraftContext(
        Options("prediction", count),
        torch.full((2, count), 7),
        tokens,
        lengths,
        folded=lengths,
        page_size=64,
        module=None,
        sample=torch.cat,
        op=lambda op: op,
        predictions=Predictions(texts, text_lens, prompt_len),
    )

    class Step:
        row_ids = torch.tensor([1, 0])
        shape = StepShape.uniform(2, count + 1)

    create(context).propose(Step(), None, (), None)  # type: ignore[arg-type]
    assert (context.drafts[0] == -1).all(), "the null row has no text"
    return [token for token in context.drafts[1].tolist() if token >= 0]


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ([1], [1, 2, 3, 4, 5, 6], [2, 3, 4, 5]),
        ([1, 2, 3], [1, 2, 3, 4], [4]),
        ([1, 2, 3, 4], [1, 2, 3, 4], []),
        ([8], [1, 2, 3], []),
        ([1], [], []),
        ([], [50, 51, 52, 53], []),
        # One equal token is no match later on, but is at the answer's beginning.
        ([1, 2, 8, 4], [1, 2, 3, 4, 5, 6], []),
        ([1, 2, 8, 4, 5], [1, 2, 3, 4, 5, 6], [6]),
        # The longest n-gram counts, wherever it is.
        ([1, 2, 3], [2, 3, 4, 9, 1, 2, 3, 5, 9, 2, 3, 6], [5, 9, 2, 3]),
        # Of equal ones the nearest counts, then the later.
        ([1, 1, 1, 8, 3, 4], [3, 4, 5, 0, 3, 4, 6, 0, 3, 4, 7], [6, 0, 3, 4]),
        ([9, 8, 3, 4], [0, 3, 4, 3, 4, 6], [6]),
        # The prompt is not a part of the n-gram.
        ([1], [9, 1, 2, 52, 1, 3], [2, 52, 1, 3]),
    ],
)
def test_drafts_follow_the_text(answer: list[int], text: list[int], expected: list[int]) -> None:
    assert drafts_after(answer, text) == expected


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Return the bundled model with the drafter and two steps in flight."""
    return make_engine("prediction", steps_in_flight=2)


@pytest.fixture(scope="module")
def expected() -> dict[bool, list[RequestOutput]]:
    """Return the answers without drafts, greedy (True) and sampled."""
    plain = make_engine(None)
    return {base is GREEDY: plain.generate(PROMPTS, longer(base)) for base in (GREEDY, SEEDED)}


def longer(base: SamplingParams, **changes: Any) -> SamplingParams:
    """Return parameters of long answers."""
    return replace(base, max_tokens=LONG, logprobs=1, **changes)


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_predictions_change_no_answer(
    llm: LLM, expected: dict[bool, list[RequestOutput]], base: SamplingParams
) -> None:
    plain = expected[base is GREEDY]
    ids = [output.outputs[0].token_ids for output in plain]
    wrong = [*ids[1][:20], 9, *ids[1][21:]]
    moved = [*ids[2][:20], 5, 6, 7, 8, *ids[2][20:30], *ids[2][35:]]
    predictions = [ids[0], wrong, moved, None]
    params = [longer(base, prediction=one) for one in predictions]
    outputs = llm.generate(PROMPTS, params)
    assert [answer(output) for output in outputs] == [answer(output) for output in plain]
    exact, replaced, shifted, none = (output.metrics for output in outputs)
    # The prompt's step gives a token, and each step of 3 accepted drafts gives 4.
    assert exact.num_draft_tokens == exact.num_accepted_tokens and exact.num_steps == 15
    assert replaced.num_steps <= 18 and shifted.num_steps <= 22
    assert none.num_draft_tokens == 0 and none.num_steps == LONG - 1
    assert_idle(llm)


def test_rows_forget_texts_of_earlier_requests(llm: LLM) -> None:
    llm.generate(PROMPTS, longer(GREEDY, prediction=[9, 8, 7] * 30))
    outputs = llm.generate(PROMPTS, longer(GREEDY))
    assert not any(output.metrics.num_draft_tokens for output in outputs)
    column = worker_of(llm.engine).table.predictions
    assert isinstance(column, PredictionColumn) and not column.text_lens.any()


def test_preempted_rows_keep_their_texts() -> None:
    limits: dict[str, Any] = {"num_gpu_blocks": 9, "max_model_len": 400}
    llm = make_engine("prediction", enable_prefix_caching=False, **limits)
    params = [replace(SEEDED, seed=seed, max_tokens=150) for seed in range(4)]
    plain = llm.generate(PROMPTS, params)
    predicting = [
        replace(one, prediction=output.outputs[0].token_ids)
        for one, output in zip(params, plain, strict=True)
    ]
    outputs = llm.generate(PROMPTS, predicting)
    assert [answer(output) for output in outputs] == [answer(output) for output in plain]
    assert sum(output.metrics.num_preemptions for output in outputs)
    assert all(output.metrics.num_accepted_tokens > 100 for output in outputs)
    assert_idle(llm)


def test_text_is_tokenized_and_cut_to_the_context(llm: LLM) -> None:
    (plain,) = llm.generate(TEXT, longer(GREEDY))
    text = plain.outputs[0].text
    (output,) = llm.generate(TEXT, longer(GREEDY, prediction=text))
    assert answer(output) == answer(plain) and output.metrics.num_accepted_tokens > LONG // 2
    (output,) = llm.generate(TEXT, longer(GREEDY, prediction=[9] * 5000))
    assert answer(output) == answer(plain)
    (output,) = llm.generate(TEXT, longer(GREEDY, prediction=""))
    assert answer(output) == answer(plain)


def test_other_drafters_ignore_predictions() -> None:
    llm = make_engine("ngram")
    (plain,) = llm.generate(TEXT, longer(GREEDY))
    (output,) = llm.generate(TEXT, longer(GREEDY, prediction=[3] * 50))
    assert answer(output) == answer(plain)
    assert not worker_of(llm.engine).table.predictions.tensors(), "no memory for texts"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "prediction=3 is not allowed; allowed: a text, or a list of token ids"),
        ([1.5], r"prediction=\[1.5\] is not allowed"),
        ([10**7], "prediction has token id 10000000; allowed: 0 to"),
        ([-1], "prediction has token id -1; allowed: 0 to"),
    ],
)
def test_wrong_predictions_are_refused(llm: LLM, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(TEXT, replace(GREEDY, prediction=value))
    assert_idle(llm)


def test_config_has_no_further_keys() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_max"):
        read({"method": "prediction", "prompt_lookup_max": 3})
