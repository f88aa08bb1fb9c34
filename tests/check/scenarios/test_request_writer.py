"""Requests express the values of their features: template lengths, ties, small buffers."""

import random
from dataclasses import replace

import pytest

from lockstep.check.companions import ATTENTION, Companions
from lockstep.check.engines import build, build_plain, rendered
from lockstep.check.judges.digests import RawLogits
from lockstep.check.judges.plain_runs import PlainRuns, closing_tag
from lockstep.check.scenarios.examiner import Examiner
from lockstep.check.scenarios.request_writer import (
    TOP_K,
    Family,
    RequestWriter,
)
from lockstep.check.scenarios.scenario import Kind, Limits, Scenario, ScenarioRequest
from lockstep.outputs import CompletionOutput
from lockstep.sampling_params import SamplingParams
from lockstep.spec.suffix import SuffixDrafter
from lockstep.step import PAGE_SIZE
from lockstep.worker.build import find_model


@pytest.fixture(scope="module")
def plain() -> PlainRuns:
    """Return the plain runs of the bundled model."""
    return PlainRuns(build_plain(None, {}))


@pytest.fixture(scope="module")
def companions() -> Companions:
    return Companions(find_model(None), {})


def writer_of(plain: PlainRuns) -> RequestWriter:
    """Return the writer of requests without texts."""
    vocab = plain.llm.engine.vocab_size
    return RequestWriter(plain, Kind(), Family((), (), ()), vocab, closing_tag(plain.llm))


@pytest.mark.parametrize("thinks", [False, True])
def test_rendered_prompts_have_the_planned_length(plain: PlainRuns, thinks: bool) -> None:
    writer = writer_of(plain)
    for pages in (1, 2, 3, 9):
        for length in (pages * PAGE_SIZE - 7, *range(pages * PAGE_SIZE - 1, pages * PAGE_SIZE + 2)):
            for seed in range(3):
                talk = writer._conversation(random.Random(seed), length, thinks)
                assert len(rendered(plain.llm, talk).ids) == length
                assert talk.thinks == thinks


def test_stop_strings_span_tokens(plain: PlainRuns) -> None:
    tokenizer = plain.llm.tokenizer
    assert tokenizer is not None
    text = "The harbour was quiet that morning, and the baker slept"
    tokens = tokenizer.fast.encode(text).ids
    ends = [len(tokenizer.fast.decode(tokens[:count])) for count in range(1, len(tokens))]
    output = CompletionOutput(index=0, text=text, token_ids=list(tokens))
    writer = writer_of(plain)
    for begin in range(1, len(text)):
        assert writer.begin_across_tokens(output, begin, 1) + 1 in ends
    assert writer.begin_across_tokens(output, 20, 15) >= 15
    late = len(text) - 1
    assert writer.begin_across_tokens(output, late, late) == late


def test_logits_of_16_bits_tie_at_the_thresholds_of_top_k(companions: Companions) -> None:
    engine = companions.plain(ATTENTION, "bf16 logits").engine
    logits = RawLogits()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    completions = engine.completions("tied", tuple(range(3, 40)), params)
    with engine.observed(logits):
        engine.serve(completions)
    ordered = logits.first_rows(40).sort(-1, descending=True).values
    for k in (k for counts in TOP_K.values() for k in counts if k > 1):
        assert (ordered[:, k - 1] == ordered[:, k]).any(), k


def test_the_small_buffer_of_answers_overflows(model: str) -> None:
    settings = {"load_format": "dummy"}
    tiny = PlainRuns(build_plain(model, settings))
    kind = Kind("suffix", 3, kept=24)
    engine = build(model, {**settings, **kind.settings()}, kind.hooks())
    request = ScenarioRequest(tuple(range(9)), {"max_tokens": 14, "ignore_eos": True, "seed": 1})
    scenario = Scenario(kind, Limits(), (request, replace(request, prompt=tuple(range(5, 99)))))
    assert Examiner(tiny, lambda _: engine).examine(scenario).difference is None
    assert engine.drafter is not None
    drafter = engine.drafter.inner
    assert isinstance(drafter, SuffixDrafter)
    # Two answers of 14 tokens, each followed by -1, are 30.
    assert drafter.next == 30 % 24
    assert (drafter.texts >= 0).sum() >= 22
