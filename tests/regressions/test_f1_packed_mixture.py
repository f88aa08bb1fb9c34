"""F1 (vLLM #39483), command line of the first report: a GPTQ int4 mixture of experts, two MTP
drafts, full graphs.

In vLLM the engine did not start. Here the server starts on such a checkpoint and answers as without
drafts, and as for a single request.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lockstep import LLM, SamplingParams
from tests.models.random_checkpoint import build, weights_of
from tests.quantization.disk import EXPERTS_ONLY, Codes, gptq, names_in, random_codes, write
from tests.regressions.conftest import PROMPTS, answers
from tests.serve.server_process import served
from tests.tiny_model import HYBRID_MOE, THREE_LAYERS, make_model

MTP = {"method": "qwen3_next_mtp", "num_speculative_tokens": 2, "adaptive": False}
SETTINGS = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "dynamic": EXPERTS_ONLY,
}
"""Settings of released checkpoints: only routed experts are quantized."""
PLAIN = ("embed", "attn", "shared_expert", "mlp.gate", "mtp.", "lm_head")
SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "cuda_graph_mode": "full"}
COUNT = 24
"""Tokens of an answer of the server."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny qwen3_5_moe in GPTQ int4, with the names and nesting of a multimodal
    checkpoint."""
    target = tmp_path_factory.mktemp("mixture")
    plain = make_model(target / "model", HYBRID_MOE, **THREE_LAYERS)
    llm = build(plain, load_format="dummy", speculative_config=MTP)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.cpu()
        for name, tensor in weights_of(llm).items()
    }

    def pick(name: str, n: int, k: int) -> Codes | None:
        return (
            None if names_in(name, PLAIN) else random_codes(n, k, 4, 32, seed=sum(map(ord, name)))
        )

    result = write(target, tensors, plain, SETTINGS, pick, partial(gptq, less=1)).quantized
    config = json.loads((result / "config.json").read_text())
    settings = config.pop("quantization_config")
    outer = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": config}
    (result / "config.json").write_text(json.dumps({**outer, "quantization_config": settings}))
    return result


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """Return the answers to PROMPTS as single requests without drafts."""
    llm = build(folder, **{**SMALL, "max_num_seqs": 1}, enable_prefix_caching=False)
    return [answers(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafting(folder: Path) -> LLM:
    """Return the engine of the report."""
    return build(folder, **SMALL, speculative_config=MTP)


def test_engine_of_the_report_starts(folder: Path, drafting: LLM) -> None:
    on_gpu = torch.cuda.is_available()
    assert drafting.engine.plan.graph_mode == ("full" if on_gpu else "none")
    assert drafting.engine.plan.quantization == "gptq-int4-g32"
    packed = [name for name in weight_names(folder) if name.endswith(".qweight")]
    assert len(packed) == 3 * 3 * HYBRID_MOE["num_experts"]
    assert all(".mlp.experts." in name for name in packed)


def weight_names(folder: Path) -> list[str]:
    """Return the tensors of the checkpoint."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_drafts_and_other_rows_keep_every_bit(drafting: LLM, alone: list[Any]) -> None:
    assert answers(drafting) == alone
    assert [answers(drafting, [prompt])[0] for prompt in PROMPTS[:2]] == alone[:2]
    assert drafting.engine.stats.draft_tokens_total > 0


def test_other_rows_keep_every_bit_without_drafts(folder: Path, alone: list[Any]) -> None:
    assert answers(build(folder, **SMALL)) == alone


@pytest.mark.slow  # its engine is tested above, serving in tests/cli/test_vllm_lines.py
def test_command_line_of_the_report(tmp_path: Path, folder: Path) -> None:
    options = ["--max-model-len", "512", "--max-num-seqs", "8", "--cuda-graph-mode", "full"]
    options += ["--speculative-config", json.dumps(MTP), "--disable-frontend-multiprocessing"]
    prompt = PROMPTS[1]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
    with served(tmp_path / "s", "--model", str(folder), *options) as (_, client):
        answer = client.post("/v1/completions", json={**body, "logprobs": 0}).json()
    (choice,) = answer["choices"]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    expected = LLM(str(folder), **SMALL).generate({"prompt_token_ids": prompt}, params)[0]
    plain = expected.outputs[0]
    pairs = zip(plain.token_ids, plain.logprobs or (), strict=True)
    assert choice["text"] == plain.text
    assert choice["logprobs"]["token_logprobs"] == [entry[t].logprob for t, entry in pairs]
    assert answer["usage"]["completion_tokens"] == COUNT
