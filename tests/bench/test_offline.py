"""The figures follow from the outputs, and measuring runs what it says."""

from pathlib import Path

import pytest

from lockstep.bench import compare, measure
from lockstep.bench.offline import _figures
from lockstep.llm import LLM
from lockstep.outputs import CompletionOutput, RequestMetrics, RequestOutput
from lockstep.sampling_params import SamplingParams
from tests.tiny_model import TWO_LAYERS, make_model

PROMPTS = [{"prompt_token_ids": list(range(3, 40))}, {"prompt_token_ids": list(range(50, 70))}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = make_model(tmp_path_factory.mktemp("model"), **TWO_LAYERS)
    return str(folder)


def output(tokens: int, first: float, end: float, steps: int, accepted: int) -> RequestOutput:
    metrics = RequestMetrics(10.0, first, end, 0, 3 * steps, accepted, steps)
    done = CompletionOutput(token_ids=list(range(tokens)))
    return RequestOutput("r", None, [1, 2], [done], True, metrics=metrics)


def test_figures_by_hand() -> None:
    """Two requests, one run: 11 + 5 tokens in 4 s; decoding from 11.0 to 13.0."""
    figures = _figures([[output(11, 11.0, 13.0, 5, 5), output(5, 11.5, 12.5, 3, 1)]], [4.0])
    assert figures.tokens == 16 and figures.prompt_tokens == 4 and figures.requests == 2
    assert figures.wall_tokens_per_s == pytest.approx(4.0)
    assert figures.decode_tokens_per_s == pytest.approx(14 / 2.0)
    assert figures.ms_per_step == pytest.approx(2000 / 5)
    assert figures.ttft_ms == pytest.approx(1250.0)
    assert figures.acceptance_length == pytest.approx(1 + 6 / 8)
    assert figures.acceptance_rate == pytest.approx(6 / 24)


def test_deviation_is_over_the_runs() -> None:
    run = [output(11, 11.0, 13.0, 5, 0)]
    figures = _figures([run, run], [1.0, 2.0])
    assert figures.wall_tokens_per_s == pytest.approx((11 + 5.5) / 2)
    assert figures.wall_deviation == pytest.approx(3.8891, rel=1e-4)
    assert figures.wall_cv == pytest.approx(3.8891 / 8.25, rel=1e-4)
    assert figures.decode_deviation == 0.0


def test_measure_runs_warm_ups_and_runs(model: str) -> None:
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False)
    calls: list[str] = []
    figures, outputs = measure(
        llm, PROMPTS, PARAMS, 1, 2, lambda what, done, of: calls.append(f"{what} {done}/{of}")
    )
    assert calls == ["warming up 0/3", "measuring 1/3", "measuring 2/3"]
    assert figures.runs == 2 and figures.tokens == 18 and len(outputs) == 2
    assert figures.decode_tokens_per_s > 0 and figures.ms_per_step > 0
    assert figures.acceptance_length == 1.0


def test_compare_sees_that_tokens_agree_and_that_they_do_not(model: str) -> None:
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    spec = {"method": "ngram", "num_speculative_tokens": 2}
    plain = LLM(model, **common)
    same, _ = compare(plain, LLM(model, speculative_config=spec, **common), PROMPTS, PARAMS, 0, 1)
    assert same.disagreement is None and same.speedup > 0
    other, _ = compare(plain, LLM(model, **common | {"seed": 1}), PROMPTS, PARAMS, 0, 1)
    assert other.disagreement is not None
