"""On a GPU, a launch never blocks the host; the host waits only where it reads results."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.example_prompts import long_prompt, short_prompts
from lockstep.worker.executor import worker_of

pytestmark = pytest.mark.gpu

PLAIN = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False)
ALL_PARAMETERS = replace(
    PLAIN,
    temperature=0.8,
    top_p=0.9,
    seed=3,
    presence_penalty=0.5,
    logit_bias={7: 1.0},
    min_tokens=9,
    stop_token_ids=[3],
    bad_words=["nothing at all"],
)


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_launch_does_not_synchronize(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admissions with every parameter, chunked prompts, new pages, steps with drafts."""
    spec = {"method": drafter, "num_speculative_tokens": 3} if drafter != "none" else None
    llm = LLM(device="cuda", max_model_len=2048, max_num_seqs=8, speculative_config=spec)
    prompts = [{"prompt_token_ids": ids} for ids in [*short_prompts(llm), long_prompt(llm, 900)]]
    plain = llm.generate(prompts, ALL_PARAMETERS)
    runner = worker_of(llm.engine)
    launch = runner.launch
    launched = []

    def capture_checks(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched.append(launch(*arguments))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launched[-1]

    monkeypatch.setattr(runner, "launch", capture_checks)
    again = llm.generate(prompts, ALL_PARAMETERS)
    assert len(launched) > 40
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in plain]
