"""A row whose logits are no numbers ends alone, with an error; no bit of the others changes."""

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
ASKED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PARAMS = [
    ASKED,
    replace(ASKED, temperature=0.8, seed=3, top_p=0.9),
    replace(ASKED, repetition_penalty=1.2),
    replace(ASKED, temperature=1.0, seed=4, prompt_logprobs=None),
]
BANNED = {"bad_words_ids": [[POISON]]}


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose head is not its embedding."""
    base = CONFIG if request.param == "qwen3_5" else QWEN3
    return make_model(tmp_path_factory.mktemp("nan"), base, tie_word_embeddings=False)


def make(folder: Path, drafter: str | None, **settings: Any) -> LLM:
    """An engine of four rows with random weights that runs two steps ahead."""
    settings = {"model": str(folder), "load_format": "dummy", "steps_in_flight": 2, **settings}
    return make_engine(drafter, skip_tokenizer_init=True, **settings)


def poison(llm: LLM) -> None:
    """From now on whatever has read the token POISON is NaN."""
    with torch.inference_mode():
        worker_of(llm.engine).model.embed.weight[POISON] = torch.nan  # type: ignore[union-attr, operator]


def prompts() -> list[list[int]]:
    """Of several chunks and of one; none holds the poison."""
    return [
        [(7 * i + k) % POISON for k in range(length)] for i, length in enumerate((9, 70, 130, 20))
    ]


def told(output: RequestOutput) -> list[Any]:
    """All that a request was answered, as bits."""
    one = output.outputs[0]
    return [one.token_ids, one.finish_reason, bits(one.logprobs), bits(output.prompt_logprobs)]


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_row_of_nan_ends_alone(folder: Path, drafter: str | None) -> None:
    llm = make(folder, drafter)
    params = [replace(p, **BANNED) for p in PARAMS]
    expected = [told(out) for out in llm.generate(prompts(), params)]
    poison(llm)
    llm.engine.clear()
    bad = [POISON, *prompts()[1]]
    for place in range(5):  # where the bad one stands among them, and which rows are free for it
        asked = prompts()
        how = list(params)
        asked.insert(place, bad)
        how.insert(place, PARAMS[place % 4])
        outs = llm.generate(asked, how)
        wrong = outs.pop(place)
        assert [told(out) for out in outs] == expected
        one = wrong.outputs[0]
        assert (one.token_ids, one.finish_reason, one.error) == ([], "error", NO_TOKEN)
        assert wrong.finished and not one.logprobs
        for entry in wrong.prompt_logprobs or ():
            assert entry is None
    assert llm.engine.stats.requests_success_total["error"] == 5
    assert_idle(llm)


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_what_came_before_the_nan_stands(folder: Path, drafter: str | None) -> None:
    """The token that the model emits at some place is made poison: what follows it is none."""
    llm = make(folder, drafter)
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


def test_a_row_of_nan_among_rows_that_a_module_drafts_for(tmp_path: Path) -> None:
    test_a_row_of_nan_ends_alone(make_model(tmp_path, tie_word_embeddings=False), "mtp")


def test_a_draft_module_of_nan_costs_speed_alone(tmp_path: Path) -> None:
    """Its drafts are none, and the answers are the target's."""
    folder = make_model(tmp_path, CONFIG, tie_word_embeddings=False)
    llm = make(folder, "mtp")
    expected = [told(out) for out in llm.generate(prompts(), PARAMS)]
    with torch.inference_mode():
        for weight in worker_of(llm.engine).program.drafter.context.module.fc.parameters():  # type: ignore[attr-defined]
            weight.fill_(torch.nan)
    llm.engine.clear()
    outs = llm.generate(prompts(), PARAMS)
    assert [told(out) for out in outs] == expected
    assert sum(out.metrics.num_draft_tokens for out in outs) <= len(outs) * 3 * 2


def test_where_all_is_banned_the_answer_ends(folder: Path) -> None:
    """Two words that together leave no token: the second one's end, once the first token stands."""
    llm = make(folder, None)
    how = replace(ASKED, allowed_token_ids=[5], bad_words_ids=[[5, 5]])
    one = llm.generate(prompts()[0], how)[0].outputs[0]
    assert (one.token_ids, one.finish_reason, one.error) == ([5], "error", NO_TOKEN)
