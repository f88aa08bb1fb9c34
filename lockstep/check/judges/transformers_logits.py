"""Comparison of the plain run's raw logits with those of transformers.

A fault of the model code is the same in all runs, so comparing them cannot show it.
"""

import math
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lockstep.check.deadline import NO_DEADLINE, TIME_UP, Deadline
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.engines import CheckEngine
from lockstep.check.judges.digests import RawLogits
from lockstep.check.matrix.cases import Case
from lockstep.check.matrix.setups import (
    LOGITS,
    LONG_PROMPT,
    TRANSFORMERS,
    Setup,
    long_prompt_length,
)
from lockstep.check.report.report import Report, Tally
from lockstep.doctor.system import GIB, free_memory
from lockstep.example_prompts import long_prompt, short_prompts
from lockstep.llm import LLM
from lockstep.models.gguf.folder import has_gguf
from lockstep.progress import Progress, ignore_progress
from lockstep.sampling_params import SamplingParams
from lockstep.worker.executor import executor_of

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
"""Maximum relative difference to the logits of transformers in fp32, by the model's dtype. In fp32
the bundled model differs by 4e-6, because of the order of additions."""
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0
)
BYTES_PER_VALUE = 5
"""Memory per value of the checkpoint: 4 bytes in fp32, and a quarter more while it is loaded."""
SETUP = Setup(NO_DRAFTER, 0, TRANSFORMERS, "none")
PART = "logits against transformers"


def why_no_oracle(llm: LLM, free_bytes: int | None) -> str | None:
    """Return why transformers cannot load what the engine has loaded; None where it can.

    free_bytes: memory that programs can still take, None if unknown.
    """
    if llm.engine.config.load_format == "dummy":
        return "the weights are random: transformers cannot load them"
    if has_gguf(llm.engine.plan.model_path):
        return "the weights are a GGUF file: the comparison with transformers loads safetensors"
    checkpoint = executor_of(llm.engine).checkpoint
    if checkpoint.quantization() is not None or llm.engine.config.quantization:
        return "the weights are quantized: transformers would read other values"
    if find_spec("transformers") is None:
        return "transformers is not installed"
    modules = checkpoint.tensors().values()
    values = sum(math.prod(info.shape) for module in modules for info in module.values())
    needed = values * BYTES_PER_VALUE
    if free_bytes is not None and needed > free_bytes:
        return (
            f"transformers needs {needed / GIB:.1f} GiB for the model in fp32, and "
            f"{free_bytes / GIB:.1f} GiB of memory are free"
        )
    return None


def load_oracle(llm: LLM) -> Any:
    """Load the checkpoint in transformers, on the CPU in fp32. Raises what transformers raises."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = llm.engine.plan.model_path
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def relative_difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the relative norm [N] of the difference of two logit tensors [N, V].

    Rows are centred first: a constant that is added to a row changes no probability.
    """
    ours, theirs = (x.double() - x.double().mean(-1, keepdim=True) for x in (ours, theirs))
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def run_oracle(
    plain: CheckEngine,
    report: Report,
    progress: Progress = ignore_progress,
    deadline: Deadline = NO_DEADLINE,
) -> float | None:
    """Run the comparison, and add it to the report, or the reason why there is none.

    Returns the largest difference, None without a comparison.
    """
    reason = why_no_oracle(plain.llm, free_memory())
    if reason is not None:
        report.omit(LOGITS, PART, reason)
        return None
    progress("logits: loading the model in transformers", 0, 0)
    try:
        oracle = load_oracle(plain.llm)
    except Exception as error:  # a model that transformers does not know is no fault of the engine
        line = str(error).strip().partition("\n")[0]
        report.omit(
            LOGITS, PART, f"transformers cannot load the model ({type(error).__name__}: {line})"
        )
        return None
    worst = 0.0
    length = long_prompt_length(plain.engine.plan.device, LONG_PROMPT)
    prompts = [*short_prompts(plain.llm), long_prompt(plain.llm, length)]
    for done, prompt in enumerate(prompts):
        if deadline.passed:
            report.omit(LOGITS, f"{len(prompts) - done} of {len(prompts)} prompts, {PART}", TIME_UP)
            break
        progress(PART, done, len(prompts))
        worst = max(worst, _compare(plain, oracle, prompt, report))
    return worst


def _compare(plain: CheckEngine, oracle: Any, prompt: Sequence[int], report: Report) -> float:
    """Compare the logits of a prompt's answer, and return their largest difference."""
    started = time.monotonic()
    tolerance = TOLERANCES[plain.engine.plan.dtype]
    name = f"prompt of {len(prompt)} tokens"
    logits = RawLogits()
    with plain.observed(logits):
        (answer,) = plain.answers([Case(name, "greedy", tuple(prompt), PARAMS)])
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
        report.fail(SETUP, TRANSFORMERS, what, name, "greedy", position)
    report.add(Tally(SETUP, 1, int(failed), round(time.monotonic() - started, 2), name))
    return float(differ.max())
