"""A row with NaN logits ends alone with an error; no bit of other rows changes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.outputs import RequestOutput
from lockstep.scheduling.request import NO_TOKEN
from lockstep.worker.executor import worker_of
from tests.bundled_model import assert_idle, bits, make_engine
from tests.tiny_model import CONFIG, QWEN3, make_model

POISON = 90
BASE_PARAMS = SamplingParams(
    temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1
)
PARAMS = [
    BASE_PARAMS,
    replace(BASE_PARAMS, temperature=0.8, seed=3, top_p=0.9),
    replace(BASE_PARAMS, repetition_penalty=1.2),
    replace(BASE_PARAMS, temperature=1.0, seed=4, prompt_logprobs=None),
]
BANNED = {"bad_words_ids": [[POISON]]}


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model with untied embeddings."""
    base = CONFIG if request.param == "qwen3_5" else QWEN3
    return make_model(tmp_path_factory.mktemp("nan"), base, tie_word_embeddings=False)


def make_tiny_llm(folder: Path, drafter: str | None, **settings: Any) -> LLM:
    """Return an engine of four rows with random weights that runs two steps ahead."""
    settings = {"model": str(folder), "load_format": "dummy", "steps_in_flight": 2, **settings}
    return make_engine(drafter, skip_tokenizer_init=True, **settings)


def poison(llm: LLM) -> None:
    """Make the embedding of the token POISON NaN."""
    with torch.inference_mode():
        worker_of(llm.engine).model.embed.weight[POISON] = torch.nan  # type: ignore[union-attr, operator]


def prompts() -> list[list[int]]:
    """Return prompts of one and of several chunks, without the token POISON."""
    return [
        [(7 * i + k) % POISON for k in range(length)] for i, length in enumerate((9, 70, 130, 20))
    ]


def answer_bits(output: RequestOutput) -> list[Any]:
    """Return a request's whole answer as bits."""
    one = output.outputs[0]
    return [one.token_ids, one.finish_reason, bits(one.logprobs), bits(output.prompt_logprobs)]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_nan_row_ends_alone(folder: Path, drafter: str | None) -> None:
    llm = make_tiny_llm(folder, drafter)
    params = [replace(p, **BANNED) for p in PARAMS]
    expected = [answer_bits(out) for out in llm.generate(prompts(), params)]
    poison(llm)
    llm.engine.clear()
    bad = [POISON, *prompts()[1]]
    for index in (0, 2, 4):  # position of the bad request in the batch
        requested = prompts()
        how = list(params)
        requested.insert(index, bad)
        how.insert(index, PARAMS[index % 4])
        outs = llm.generate(requested, how)
        wrong = outs.pop(index)
        assert [answer_bits(out) for out in outs] == expected
        one = wrong.outputs[0]
        assert (one.token_ids, one.finish_reason, one.error) == ([], "error", NO_TOKEN)
        assert wrong.finished and not one.logprobs
        for entry in wrong.prompt_logprobs or ():
            assert entry is None
    assert llm.engine.stats.requests_success_total["error"] == 3
    assert_idle(llm)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_tokens_before_nan_are_kept(folder: Path, drafter: str | None) -> None:
    """A token that the model emits is poisoned, so that the next step has no token."""
    llm = make_tiny_llm(folder, drafter)
    plain = llm.generate(prompts(), [replace(p, temperature=0) for p in PARAMS])
    line = plain[1].outputs[0].token_ids
    at = next(i for i, t in enumerate(line) if i >= 3 and t not in {*line[:i], *prompts()[1]})
    with torch.inference_mode():
        worker_of(llm.engine).model.embed.weight[line[at]] = torch.nan  # type: ignore[union-attr, operator]
    llm.engine.clear()
    out = llm.generate(prompts()[1], replace(PARAMS[1], temperature=0))[0]
    one = out.outputs[0]
    assert one.token_ids == line[: at + 1] and one.finish_reason == "error"
    assert bits(one.logprobs) == bits(plain[1].outputs[0].logprobs)[: at + 1]
    json.dumps([[x.logprob for x in e.values()] for e in one.logprobs or ()], allow_nan=False)
    assert bits(out.prompt_logprobs) == bits(plain[1].prompt_logprobs)
    assert_idle(llm)


@pytest.mark.slow
def test_nan_row_ends_alone_with_mtp(tmp_path: Path) -> None:
    test_nan_row_ends_alone(make_model(tmp_path, tie_word_embeddings=False), "mtp")


def test_nan_draft_module_changes_no_answer(tmp_path: Path) -> None:
    """It gives no drafts, and the answers are the target's."""
    folder = make_model(tmp_path, CONFIG, tie_word_embeddings=False)
    llm = make_tiny_llm(folder, "mtp")
    expected = [answer_bits(out) for out in llm.generate(prompts(), PARAMS)]
    with torch.inference_mode():
        for weight in worker_of(llm.engine).program.drafter.context.module.fc.parameters():  # type: ignore[attr-defined]
            weight.fill_(torch.nan)
    llm.engine.clear()
    outs = llm.generate(prompts(), PARAMS)
    assert [answer_bits(out) for out in outs] == expected
    assert sum(out.metrics.num_draft_tokens for out in outs) <= len(outs) * 3 * 2


def test_answer_ends_when_all_tokens_are_banned(folder: Path) -> None:
    """Allowed tokens and bad words that together leave no token after the first one."""
    llm = make_tiny_llm(folder, None)
    how = replace(BASE_PARAMS, allowed_token_ids=[5], bad_words_ids=[[5, 5]])
    one = llm.generate(prompts()[0], how)[0].outputs[0]
    assert (one.token_ids, one.finish_reason, one.error) == ([5], "error", NO_TOKEN)
