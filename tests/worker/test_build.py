"""Engine construction: warm-up steps are possible schedules, and hooks replace the drafter and the
draft policy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.check.oracle_drafter import OracleDrafter
from lockstep.engine_builder import build_engine
from lockstep.errors import ConfigError
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.worker.build import largest_prompts, numerics
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from tests.tiny_model import make_model
from tests.worker.row_table_model import make_plan


@pytest.mark.parametrize(
    ("maximum", "rows", "budget", "lengths"),
    [
        (40, 5, 40, [40]),
        (40, 5, 64, [40, 24]),
        (40, 5, 80, [40, 40]),
        (40, 5, 1000, [40] * 5),
        (100, 1, 64, [64]),
        (40, 1, 64, [40]),
    ],
)
def test_largest_prompts_fit_rows(maximum: int, rows: int, budget: int, lengths: list[int]) -> None:
    plan = replace(
        make_plan(1), max_model_len=maximum, max_num_seqs=rows, max_num_batched_tokens=budget
    )
    assert largest_prompts(plan) == lengths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("cpu", {"max_model_len": 16}),
        pytest.param("cuda", {"max_model_len": 16}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"max_num_batched_tokens": 16384}, marks=pytest.mark.gpu),
    ],
)
def test_max_model_len_below_a_page_or_a_step(device: str, settings: dict[str, int]) -> None:
    """Warm-up and profiling stay within max_model_len."""
    llm = LLM(device=device, **{"max_model_len": 500, "max_num_seqs": 3, **settings})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, params)
    plain = LLM(device=device, max_num_seqs=3).generate({"prompt_token_ids": [5, 6, 7]}, params)
    assert [o.outputs[0].token_ids for o in outputs] == [plain[0].outputs[0].token_ids] * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of a tiny model with random weights."""
    folder = make_model(tmp_path_factory.mktemp("tiny"))
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    return {"model": str(folder), "max_model_len": 128, "max_num_seqs": 2, **common}


def test_llm_over_engine_equals_llm_with_own_engine(tiny: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine = build_engine(EngineConfig.read(**tiny), hooks=CheckHooks(preempt_every=2))
    over, mine = (
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids
        for llm in (LLM.from_engine(engine), LLM(**tiny))
    )
    assert over == mine and engine.scheduler.preemptions > 0


def test_hooks_replace_drafter_and_draft_policy(tiny: dict[str, Any]) -> None:
    config = EngineConfig.read(speculative_config={"method": "mtp"}, **tiny)
    hooks = CheckHooks(drafter=OracleDrafter, draft_policy=RandomDraftLength)
    engine = build_engine(config, hooks=hooks)
    assert isinstance(worker_of(engine).program.drafter, OracleDrafter)
    assert isinstance(engine.scheduler.draft_policy, RandomDraftLength)
    assert engine.plan.draft_lengths == (0, 1, 3) and engine.plan.query_len == 4


def test_hook_drafter_without_speculative_config_is_refused(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="CheckHooks needs a speculative_config"):
        build_engine(EngineConfig.read(**tiny), hooks=CheckHooks(drafter=OracleDrafter))


def test_numerics_name_triton_only_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    actual = numerics("cuda", torch.bfloat16)
    assert actual.startswith("sm90/weights-bfloat16/") and "/triton-" in actual
    assert "triton" not in numerics("cpu", torch.float32)


def test_numerics_name_numba_only_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "numba" in numerics("cpu", torch.float32).split("/")
    assert "numba" not in numerics("cuda", torch.float32)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "numba" not in numerics("cpu", torch.float32)
