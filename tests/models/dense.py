"""Tiny decoders: an engine and a transformers model over one checkpoint, and greedy answers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.engine_builder import build_engine
from lockstep.outputs import RequestOutput
from lockstep.worker.hooks import NO_HOOKS, CheckHooks

VOCAB = 320
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


def make_llm(folder: Path, hooks: CheckHooks = NO_HOOKS, **settings: object) -> LLM:
    """Return an engine over a tiny model's folder, with token ids as input and output."""
    chosen = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 4, **settings}
    return LLM.from_engine(
        build_engine(EngineConfig.read(model=str(folder), **chosen), hooks=hooks)
    )


def random_pair(folder: Path, family: str, base: dict[str, Any], **changes: Any) -> Any:
    """Return (engine, oracle) over one random checkpoint that transformers saved.

    family: prefix of its classes in transformers, e.g. Qwen3.
    """
    oracle = random_oracle(folder, family, base, **changes)
    return make_llm(folder, speculative_config=NGRAM), oracle


def random_oracle(
    folder: Path, family: str, base: dict[str, Any], centre: float = 1.0, **changes: Any
) -> Any:
    """Return a random transformers model, saved in the folder.

    centre: mean of the norms, except those within a recurrent layer, whose mean is 1.
    """
    transformers = pytest.importorskip("transformers")
    settings = {**base, "torch_dtype": "float32", "vocab_size": VOCAB, **changes}
    torch.manual_seed(0)
    result = getattr(transformers, f"{family}ForCausalLM")
    config = result.config_class(**settings)
    config._experts_implementation = "eager"  # what it takes else wants widths of 16 bytes
    oracle = result(config).eval()
    for name, parameter in oracle.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            parameter.data.normal_()
        else:
            middle = 1.0 if ".linear_attn." in name else centre
            parameter.data.uniform_(middle - 0.5, middle + 0.5)
    oracle.save_pretrained(folder)
    return oracle


def random_targets(
    factory: pytest.TempPathFactory, families: dict[str, dict[str, Any]], layers: int
) -> dict[str, tuple[Path, Any]]:
    """Return, for each family, the folder of a random model with this many layers, and its
    transformers model."""
    result = {}
    for family, base in families.items():
        folder = factory.mktemp(family)
        result[family] = folder, random_oracle(folder, family, base, num_hidden_layers=layers)
    return result


def prompts(count: int, longest: int) -> list[list[int]]:
    """Return random token ids of 16 tokens up to `longest`."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.linspace(16, longest, count).long().tolist()
    return [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in lengths]


def answer(folder: Path, prompt: list[int], count: int = 90, **settings: object) -> RequestOutput:
    """Return a greedy answer of a folder with dummy weights."""
    llm = make_llm(folder, load_format="dummy", **settings)
    return generate_greedy(llm, prompt, count)


def generate_greedy(llm: LLM, prompt: list[int], count: int = 90) -> RequestOutput:
    """Return a greedy answer with the log-probability of each token."""
    return llm.generate({"prompt_token_ids": prompt}, greedy(count))[0]


def greedy(count: int) -> SamplingParams:
    """Return parameters for this many greedy tokens, each with its log-probability."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)


def bits(output: RequestOutput) -> list[tuple[int, float]]:
    """Return each token with its log-probability, which are equal only if the logits are."""
    one = output.outputs[0]
    assert one.logprobs is not None
    return [(t, e[t].logprob) for t, e in zip(one.token_ids, one.logprobs, strict=True)]
