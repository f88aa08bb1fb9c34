"""Comparison of the plain run's raw logits with those of transformers.

A fault of the model code is the same in all runs, so comparing them cannot show it.
"""

import time
from typing import Any

import torch
from torch import Tensor

from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.engines import CheckEngine
from lockstep.check.judges.digests import RawLogits
from lockstep.check.matrix.cases import Case
from lockstep.check.matrix.setups import LONG_PROMPT, TRANSFORMERS, Setup
from lockstep.check.report.report import Report, Tally
from lockstep.errors import ConfigError
from lockstep.example_prompts import long_prompt, short_prompts
from lockstep.llm import LLM
from lockstep.models.gguf.folder import has_gguf
from lockstep.sampling_params import SamplingParams
from lockstep.worker.executor import executor_of

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
"""Maximum relative difference to the logits of transformers in fp32, by the model's dtype. In fp32
the bundled model differs by 4e-6, because of the order of additions."""
TOKENS = 8
"""Output tokens per prompt."""


def load_oracle(llm: LLM) -> Any:
    """Load the checkpoint in transformers, on the CPU in fp32. Raises ConfigError."""
    if llm.engine.config.load_format == "dummy":
        raise ConfigError(
            "--oracle is not allowed with load_format='dummy': no other engine has these weights. "
            "Leave one of them out."
        )
    folder = llm.engine.plan.model_path
    if has_gguf(folder):
        raise ConfigError(
            "--oracle is not allowed with a GGUF file: the comparison loads safetensors. Leave it "
            "out, or name the model's safetensors."
        )
    quantized = executor_of(llm.engine).checkpoint.quantization() is not None
    if quantized or llm.engine.config.quantization:
        raise ConfigError(
            "--oracle is not allowed with quantized weights: transformers would read other values. "
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


def relative_difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the relative norm [N] of the difference of two logit tensors [N, V].

    Rows are centred first: a constant that is added to a row changes no probability.
    """
    ours, theirs = (x.double() - x.double().mean(-1, keepdim=True) for x in (ours, theirs))
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def run_oracle(plain: CheckEngine, report: Report) -> float:
    """Run the comparison, add it to the report, and return the largest difference."""
    oracle = load_oracle(plain.llm)
    tolerance = TOLERANCES[plain.engine.plan.dtype]
    setup = Setup(NO_DRAFTER, 0, TRANSFORMERS, "none")
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
        differ = relative_difference(logits.first_rows(len(tokens)), theirs.float())
        failed = float(differ.max()) > tolerance or not bool(differ.isfinite().all())
        if failed:
            # Not `differ > tolerance`: a NaN is neither greater nor less.
            position = int((~(differ <= tolerance)).nonzero()[0])
            norm = float(differ[position])
            what = (
                f"the logits differ from transformers' by {norm:.2g} of their norm; "
                f"allowed: {tolerance:g}"
            )
            report.fail(setup, TRANSFORMERS, what, name, "greedy", position)
        worst = max(worst, float(differ.max()))
        report.add(Tally(setup, 1, int(failed), round(time.monotonic() - started, 2), name))
    return worst
