"""Synthetic acceptance has the requested probability, and is refused with real weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.outputs import RequestOutput
from lockstep.sampling_params import SamplingParams
from tests.bundled_model import answer, make_engine
from tests.tiny_model import TWO_LAYERS, make_model

PROMPTS = [[3 + i, 5, 7, 11 * i, 13] for i in range(8)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = make_model(tmp_path_factory.mktemp("model"), **TWO_LAYERS)
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}


def generate_batch(
    tiny: dict[str, Any], drafter: str | None, count: int = 8, max_tokens: int = 24, **settings: Any
) -> list[RequestOutput]:
    """Return the answers to `count` concurrent requests over alternating prompts."""
    llm = make_engine(drafter, max_num_seqs=count, **tiny, **settings)
    params = [replace(PARAMS, max_tokens=max_tokens, seed=i) for i in range(count)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params)


@pytest.mark.default_cases("0.3-1")
@pytest.mark.parametrize(("chance", "drafts"), [(0.7, 3), (0.3, 1), (0.9, 7)])
def test_synthetic_acceptance_rate(tiny: dict[str, Any], chance: float, drafts: int) -> None:
    """The acceptance length is 1 + p + ... + p^K, within 4 sigma of 1,600 tokens' steps."""
    arguments = {"synthetic_acceptance": chance, "num_speculative_tokens": drafts}
    outs = generate_batch(tiny, "mtp", count=32, max_tokens=50, **arguments)
    steps, accepted = (
        sum(getattr(o.metrics, f"num_{name}") for o in outs)
        for name in ("steps", "accepted_tokens")
    )
    implied = sum(chance**i for i in range(1, drafts + 1))
    square = sum((2 * i - 1) * chance**i for i in range(1, drafts + 1))
    sigma = ((square - implied**2) / steps) ** 0.5
    assert steps > 100 and abs(accepted / steps - implied) < 4 * sigma


def test_synthetic_acceptance_zero_and_one(tiny: dict[str, Any]) -> None:
    plain = generate_batch(tiny, None)
    for one, other in zip(
        plain, generate_batch(tiny, "mtp", synthetic_acceptance=0.0), strict=True
    ):
        assert answer(one) == answer(other)
    for out in generate_batch(tiny, "mtp", synthetic_acceptance=1.0):
        assert out.metrics.num_accepted_tokens == 3 * out.metrics.num_steps


def test_missing_drafts_are_not_accepted(tiny: dict[str, Any]) -> None:
    for out in generate_batch(tiny, "ngram", synthetic_acceptance=1.0):
        m = out.metrics
        assert m.num_accepted_tokens == m.num_draft_tokens < 3 * m.num_steps


@pytest.mark.slow
def test_synthetic_acceptance_depends_on_seed_only(tiny: dict[str, Any]) -> None:
    llm = make_engine("mtp", **tiny, synthetic_acceptance=0.6)
    params = [replace(PARAMS, seed=i) for i in range(4)]
    prompt = {"prompt_token_ids": PROMPTS[0]}
    alone = [answer(llm.generate(prompt, p)[0]) for p in params]
    together = llm.generate([prompt] * 4, params)
    assert [answer(out) for out in together] == alone
    assert len({str(a) for a in alone}) == 4


def test_numerics_name_synthetic_acceptance(tiny: dict[str, Any]) -> None:
    engine = make_engine("mtp", **tiny, synthetic_acceptance=0.7).engine
    assert engine.numerics.endswith("/synthetic-acceptance-0.7")
    assert engine.fingerprint != make_engine("mtp", **tiny).engine.fingerprint


def test_synthetic_acceptance_is_refused_with_real_weights() -> None:
    spec = {"method": "mtp", "synthetic_acceptance": 0.7}
    with pytest.raises(ConfigError, match=r"synthetic_acceptance=0.7.*load_format='auto'.*dummy"):
        EngineConfig(speculative_config=spec)
    with pytest.raises(ConfigError, match=r"synthetic_acceptance=1.5.*from 0.0 to 1.0"):
        EngineConfig(speculative_config={**spec, "synthetic_acceptance": 1.5}, load_format="dummy")
    assert EngineConfig(speculative_config=spec, load_format="dummy").speculative_config
