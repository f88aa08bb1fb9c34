"""Engines over a checkpoint of a tiny model: their weights and their answers."""

from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep import LLM, SamplingParams
from lockstep.worker.executor import worker_of

MTP = {"method": "mtp", "num_speculative_tokens": 2}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
PROMPT = {"prompt_token_ids": list(range(3, 90))}


def build(folder: Path, **settings: Any) -> LLM:
    """Return an engine over a folder's weights."""
    settings = {"max_model_len": 128, "max_num_seqs": 1, **settings}
    return LLM(str(folder), skip_tokenizer_init=True, **settings)


def weights_of(llm: LLM) -> dict[str, Tensor]:
    """Return the engine's weights as a checkpoint, by their published names."""
    worker = worker_of(llm.engine)
    result = {
        name if name == "lm_head.weight" else f"model.{name}": x
        for name, x in worker.model.weights().items()  # type: ignore[operator]
    }
    draft = worker.program.drafter.context.module
    result.update({f"mtp.{name}": x for name, x in draft.weights().items()})
    return {name: x.detach().clone().contiguous() for name, x in result.items()}


def answer(llm: LLM) -> list[Any]:
    """Return tokens and the bits of their log-probabilities."""
    out = llm.generate(PROMPT, PARAMS)[0].outputs[0]
    return [(t, e[t].logprob.hex()) for t, e in zip(out.token_ids, out.logprobs or (), strict=True)]
