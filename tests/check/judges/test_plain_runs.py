"""Judges of plain runs accept ties and thoughts that begin unasked, and name wrong ranks."""

from dataclasses import replace

import pytest

from lockstep.answer import Answer
from lockstep.check.engines import Conversation, build_plain, rendered
from lockstep.check.judges import numpy_sampler
from lockstep.check.judges.plain_runs import PlainRuns, _wrong_prompt, thought_tags
from lockstep.check.random_adapters import RandomAdapters
from lockstep.layers.lora import LoRA
from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams, StructuredOutputsParams
from lockstep.scheduling.request import Request
from lockstep.text.processor import Rendered
from lockstep.worker.executor import worker_of


def wrong_prompt(*entry: tuple[int, float, int]) -> str | None:
    """Judge one prompt token, 20, by entries of token, log-probability and rank."""
    scores = tuple((token, value.hex(), rank) for token, value, rank in entry)
    answer = Answer((), (), RequestMetrics(), prompt_logprobs=(scores,))
    return _wrong_prompt(answer, Request("a", [1, 20]), 3)


def test_equal_logits_have_one_rank_or_several() -> None:
    # The prompt token shares the rank of its equals; the likeliest tokens are numbered.
    assert wrong_prompt((5, -1.0, 1), (7, -2.0, 2), (9, -2.0, 3), (20, -2.0, 2)) is None


def test_wrong_ranks_are_named() -> None:
    assert "ranks" in str(wrong_prompt((5, -1.0, 2), (7, -2.0, 1), (20, -3.0, 3)))
    assert "above 1" in str(wrong_prompt((5, -0.1, 1), (7, -0.1, 2), (20, -3.0, 3)))


def test_template_may_ignore_disabled_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainRuns(build_plain(None, {}))
    processor = plain.llm.processor
    render = processor.conversation

    def always_thinks(messages: list[dict[str, str]], enable_thinking: bool) -> object:
        return render(messages, enable_thinking=True)

    monkeypatch.setattr(processor, "conversation", always_thinks)
    talk = Conversation("Hello!", thinks=False)
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=form)
    plain.answers(rendered(plain.llm, talk).ids, params, talk)
    assert not plain.faults


@pytest.mark.parametrize("form", [{"choice": ["yes", "no"]}, {"regex": "[0-9]{2}"}])
def test_answer_may_begin_the_thought_itself(
    form: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of some templates ends with neither tag. Their models write both."""
    plain = PlainRuns(build_plain(None, {}))
    processor = plain.llm.processor
    render = processor.conversation
    opening, closing = thought_tags(plain.llm) or (0, 0)

    def without_tags(messages: list[dict[str, str]], enable_thinking: bool) -> Rendered:
        prompt = render(messages, enable_thinking=True)
        text = prompt.text.rstrip().removesuffix("<think>")
        return replace(prompt, text=text, ids=prompt.ids[: prompt.ids.index(opening)])

    monkeypatch.setattr(processor, "conversation", without_tags)
    talk = Conversation("Hello!", thinks=True)
    for bias in ({opening: 100.0, closing: 50.0}, {opening: -100.0}):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=12,
            logit_bias=bias,
            repetition_penalty=10.0,
            structured_outputs=StructuredOutputsParams(**form),
        )
        (answer,) = plain.answers(rendered(plain.llm, talk).ids, params, talk)
        assert (answer.tokens[:2] == (opening, closing)) == (bias[opening] > 0)
        assert not plain.faults


def test_answer_may_end_with_an_error_where_no_token_is_allowed() -> None:
    """The second token has none that is allowed. A replay may have such parameters."""
    plain = PlainRuns(build_plain(None, {}))
    words = [[first, second] for first in (65, 66) for second in (65, 66)]
    allowed = {"allowed_token_ids": [65, 66]}
    params = SamplingParams(max_tokens=4, ignore_eos=True, **allowed, bad_words_ids=words)
    (answer,) = plain.answers([70, 71, 72], params)
    assert (len(answer.tokens), answer.ending) == (1, ("error", None))
    assert not plain.faults
    wrong = numpy_sampler.wrong_end(answer.tokens, answer.ending, frozenset(), params, 4)
    assert wrong is not None, "with an allowed token the error would be a fault"


@pytest.mark.parametrize("is_known", [True, False])
def test_form_and_banned_tokens_may_leave_none(is_known: bool) -> None:
    context = numpy_sampler.TokenContext([1], [2], frozenset(), has_unknown_form=not is_known)
    some = SamplingParams(allowed_token_ids=[4, 5])
    assert numpy_sampler.may_allow_no_token(context, some, 9) == (not is_known)
    assert not numpy_sampler.may_allow_no_token(context, SamplingParams(), 9)


@pytest.mark.parametrize("works", [True, False])
def test_adapter_that_changes_nothing_is_named(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs of such an adapter are equal, and so are those of another one."""
    engine = build_plain(None, {})
    adapters = RandomAdapters(worker_of(engine.engine).model)
    plain = PlainRuns(engine, lambda: build_plain(None, adapters.settings())).of("second")
    if not works:
        monkeypatch.setattr(LoRA, "forward", lambda self, y, x, step: y)
    plain.answers([70, 71, 72], SamplingParams(max_tokens=2))
    assert [fault.what for fault in plain.faults] == (
        [] if works else ["the adapter second changes no logit"]
    )
