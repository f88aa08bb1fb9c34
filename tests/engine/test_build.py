"""What stands before a request comes: steps that warm up are steps that a schedule could bring."""

from dataclasses import replace

import pytest

from lockstep import LLM, SamplingParams
from lockstep.engine.build import largest_prompts
from tests.runner.walk import make_plan


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
