"""F1 (vLLM #39483), command lines of the second and third report, on two ranks.

The second is an AutoRound int4 hybrid in float16 with a 3-bit cache and three MTP drafts, the third
a mixture in FP8 blocks with a `k8v4` cache. Both served on two cards of 24 GB. Here the servers
start on two ranks of a CPU, and answer as one process does.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from tests.cli.test_vllm_lines import QUANTIZED, quantized_folder
from tests.quantization import test_expert_checkpoints as checkpoints
from tests.serve.server_process import served

SECOND = QUANTIZED.replace("--tensor-parallel-size 1", "--tensor-parallel-size 2")
THIRD = (
    "serve M --quantization fp8 --kv-cache-dtype turboquant_k8v4 --tensor-parallel-size 2 "
    """--max-model-len 4096 --speculative-config '{"method":"mtp","num_speculative_tokens":3}'"""
)
WIDE = {
    **checkpoints.FAMILIES["qwen3_5_moe"],
    "hidden_size": 256,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
}
"""Sizes of which half is whole blocks of 128, as in the released checkpoint."""
PROMPT = [5 + i * i % 90 for i in range(70)]
COUNT = 24
"""Tokens of an answer."""

pytestmark = pytest.mark.slow


def auto_round(folder: Path) -> Path:
    """Write a tiny checkpoint like that of the second report."""
    return quantized_folder(folder)


def fp8_mixture(folder: Path) -> Path:
    """Write a tiny checkpoint like that of the third report."""
    checkpoints.FAMILIES["wide"] = WIDE
    folder.mkdir()
    quantized, _, done = checkpoints.write(folder, "wide", checkpoints.FORMATS["fp8 blocks"])
    assert any(".experts." in name for name in done) and any("attn" in name for name in done)
    return quantized


@pytest.mark.parametrize(
    ("line", "write", "weights"),
    [(SECOND, auto_round, "auto-round"), (THIRD, fp8_mixture, "fp8")],
    ids=["second", "third"],
)
def test_command_line_answers_on_two_ranks(
    line: str, write: Any, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoints.FAMILIES, "wide", WIDE)
    folder = write(tmp_path / "model")
    options = shlex.split(line)[2:]
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": COUNT,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 1,
    }
    extra = ["--max-num-seqs", "2", "--skip-tokenizer-init"]
    with served(tmp_path / "s", "--model", str(folder), *options, *extra) as (_, client):
        answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    values = dict(zip(options[::2], options[1::2], strict=True))
    llm = LLM(
        str(folder),
        dtype=values.get("--dtype", "auto"),
        kv_cache_dtype=values["--kv-cache-dtype"],
        max_model_len=int(values["--max-model-len"]),
        max_num_seqs=1,
        speculative_config=None,
        skip_tokenizer_init=True,
    )
    assert llm.engine.plan.quantization is not None
    assert llm.engine.plan.quantization.startswith(weights)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    plain = output.outputs[0]
    assert choice["token_ids"] == plain.token_ids
    assert answer["system_fingerprint"] == llm.engine.fingerprint
    pairs = zip(plain.token_ids, plain.logprobs or (), strict=True)
    expected = [entry[token].logprob for token, entry in pairs]
    assert choice["logprobs"]["token_logprobs"] == expected
