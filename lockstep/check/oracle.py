"""The oracle section: the plain run's raw logits against those of transformers.

A fault of the model itself is in every way to run alike, so that no comparison among them shows it.
"""

import time
from typing import Any

import torch
from torch import Tensor

from lockstep.check.cases import Case
from lockstep.check.digests import RawLogits
from lockstep.check.drafters import NONE
from lockstep.check.harness import CheckEngine
from lockstep.check.matrix import LONG_PROMPT, ORACLE, Setup
from lockstep.check.report import Report, Tally
from lockstep.errors import ConfigError
from lockstep.example_prompts import long_prompt, short_prompts
from lockstep.llm import LLM
from lockstep.models.gguf.folder import holds_gguf
from lockstep.sampling_params import SamplingParams
from lockstep.worker.executor import executor_of

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
"""By the model's dtype: how far, relative to their spread, logits may be from transformers' own in
fp32. In fp32 the bundled model is 4e-6 off, by the order of additions."""
TOKENS = 8
"""Of each answer."""


def load_oracle(llm: LLM) -> Any:
    """The checkpoint in transformers, on the CPU in fp32. Raises ConfigError if there is none."""
    if llm.engine.config.load_format == "dummy":
        raise ConfigError(
            "--oracle is not allowed with load_format='dummy': no other engine has these weights. "
            "Leave one of them out."
        )
    folder = llm.engine.plan.model_path
    if holds_gguf(folder):
        raise ConfigError(
            "--oracle is not allowed with a GGUF file: the comparison loads safetensors. Leave it "
            "out, or name the model's safetensors."
        )
    packed = executor_of(llm.engine).checkpoint.quantization() is not None
    if packed or llm.engine.config.quantization:
        raise ConfigError(
            "--oracle is not allowed with packed weights: transformers would read other values. "
            "Leave it out."
        )
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "--oracle needs transformers, which is not installed. Install it, or leave it out."
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def off_by(ours: Tensor, theirs: Tensor) -> Tensor:
    """ours, theirs [N, V] -> [N]: the norm of what differs, relative to the spread of theirs.

    A constant that is added to a row changes no probability, so it does not count.
    """
    ours, theirs = (x.double() - x.double().mean(-1, keepdim=True) for x in (ours, theirs))
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def run_oracle(plain: CheckEngine, report: Report) -> float:
    """Runs the section and adds to the report; returns the largest difference."""
    oracle = load_oracle(plain.llm)
    tolerance = TOLERANCES[plain.engine.plan.dtype]
    setup = Setup(NONE, 0, ORACLE, "none")
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    worst = 0.0
    for prompt in (*short_prompts(plain.llm), long_prompt(plain.llm, LONG_PROMPT)):
        started = time.monotonic()
        name = f"prompt of {len(prompt)} tokens"
        logits = RawLogits()
        with plain.observed(logits):
            (answer,) = plain.answers([Case(name, "greedy", tuple(prompt), params)])
        tokens = answer.tokens
        with torch.no_grad():
            theirs = oracle(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        differ = off_by(logits.behind(len(tokens)), theirs.float())
        failed = float(differ.max()) > tolerance or not bool(differ.isfinite().all())
        if failed:
            at = int((~(differ <= tolerance)).nonzero()[0])
            what = (
                f"the logits are {float(differ[at]):.2g} off transformers', {tolerance:g} allowed"
            )
            report.fail(setup, ORACLE, what, name, "greedy", at)
        worst = max(worst, float(differ.max()))
        report.add(Tally(setup, 1, int(failed), round(time.monotonic() - started, 2), name))
    return worst
