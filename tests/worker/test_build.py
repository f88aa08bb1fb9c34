"""What stands before a request comes: steps that warm up are steps that a schedule could bring."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.check.answer_oracle import AnswerOracle
from lockstep.engine_builder import build_engine
from lockstep.errors import ConfigError
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.worker.build import largest_prompts, numerics
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from tests.tiny_model import make_model
from tests.worker.walk import make_plan


@pytest.mark.parametrize(
    ("most", "rows", "budget", "lengths"),
    [
        (40, 5, 40, [40]),
        (40, 5, 64, [40, 24]),
        (40, 5, 80, [40, 40]),
        (40, 5, 1000, [40] * 5),
        (100, 1, 64, [64]),
        (40, 1, 64, [40]),
    ],
)
def test_the_largest_prompts_are_no_longer_than_rows(
    most: int, rows: int, budget: int, lengths: list[int]
) -> None:
    plan = replace(
        make_plan(1), max_model_len=most, max_num_seqs=rows, max_num_batched_tokens=budget
    )
    assert largest_prompts(plan) == lengths


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("cpu", {"max_model_len": 16}),
        pytest.param("cuda", {"max_model_len": 16}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"max_num_batched_tokens": 16384}, marks=pytest.mark.gpu),
    ],
)
def test_rows_shorter_than_a_page_or_than_a_step(device: str, settings: dict[str, int]) -> None:
    """Warm-up and measuring stay within rows as long as rows may be."""
    llm = LLM(device=device, **{"max_model_len": 500, "max_num_seqs": 3, **settings})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, params)
    plain = LLM(device=device, max_num_seqs=3).generate({"prompt_token_ids": [5, 6, 7]}, params)
    assert [o.outputs[0].token_ids for o in outputs] == [plain[0].outputs[0].token_ids] * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a tiny model with random weights."""
    folder = make_model(tmp_path_factory.mktemp("tiny"))
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    return {"model": str(folder), "max_model_len": 128, "max_num_seqs": 2, **common}


def test_an_llm_over_an_engine_answers_as_one_that_builds_its_own(tiny: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine = build_engine(EngineConfig.read(**tiny), hooks=CheckHooks(preempt_every=2))
    over, own = (
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids
        for llm in (LLM.over(engine), LLM(**tiny))
    )
    assert over == own and engine.scheduler.preemptions > 0


def test_a_hook_takes_the_place_of_the_drafter_and_of_who_chooses(tiny: dict[str, Any]) -> None:
    config = EngineConfig.read(speculative_config={"method": "mtp"}, **tiny)
    hooks = CheckHooks(drafter=AnswerOracle, draft_policy=RandomDraftLength)
    engine = build_engine(config, hooks=hooks)
    assert isinstance(worker_of(engine).program.drafter, AnswerOracle)
    assert isinstance(engine.scheduler.draft_policy, RandomDraftLength)
    assert engine.plan.draft_lengths == (0, 1, 3) and engine.plan.query_len == 4


def test_a_drafter_without_a_number_of_drafts_is_refused(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="CheckHooks needs a speculative_config"):
        build_engine(EngineConfig.read(**tiny), hooks=CheckHooks(drafter=AnswerOracle))


def test_triton_is_in_the_numerics_of_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = numerics("cuda", torch.bfloat16)
    assert found.startswith("sm90/weights-bfloat16/") and "/triton-" in found
    assert "triton" not in numerics("cpu", torch.float32)
