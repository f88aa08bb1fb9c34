"""DFlash: drafts equal an independent forward pass, published files load, and invalid settings are
refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep import SamplingParams
from lockstep.errors import CheckpointError, ConfigError
from lockstep.llm import LLM
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec.dflash import create
from lockstep.worker.hooks import NO_HOOKS, CheckHooks
from tests.models.dense import VOCAB, make_llm, random_targets
from tests.spec.blocks import BLOCK, drafts_of, make_block_model
from tests.spec.watching import RecordedDrafts
from tests.tiny_model import LLAMA, QWEN3

HIDDEN = 48
LAYERS = 5
AUX_LAYERS = [0, 1, 3]
PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (130, 5, 52)]
REQUESTS = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def make_engine(
    folder: Path, draft: Path, k: int, hooks: CheckHooks = NO_HOOKS, **settings: Any
) -> LLM:
    """Return an engine of the target in `folder` that drafts blocks."""
    spec = {"method": "dflash", "model": str(draft), "num_speculative_tokens": k}
    return make_llm(folder, hooks, max_model_len=256, speculative_config=spec, **settings)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    return random_targets(tmp_path_factory, {"Llama": LLAMA, "Qwen3": QWEN3}, LAYERS)


@pytest.mark.default_cases("Llama-15", "Qwen3-4")
@pytest.mark.parametrize(("family", "k"), [("Llama", 1), ("Llama", 15), ("Qwen3", 4)])
def test_drafts_equal_the_paper(
    targets: dict[str, Any], tmp_path: Path, family: str, k: int
) -> None:
    """Every step of every row: chunked prompts, changing draft lengths, preemption, prefix hits."""
    folder, oracle = targets[family]
    model = make_block_model(tmp_path / "draft", VOCAB, HIDDEN, AUX_LAYERS, inner=k > 1)
    seen = RecordedDrafts(create)
    hooks = CheckHooks(drafter=seen.create, draft_policy=RandomDraftLength, preempt_every=3)
    llm = make_engine(folder, tmp_path / "draft", k, hooks, max_num_batched_tokens=64)
    outs = llm.generate(REQUESTS, GREEDY)
    again = llm.generate(REQUESTS, GREEDY)
    assert again[0].metrics.num_cached_tokens == 128
    embedding = oracle.model.embed_tokens.weight.detach()
    head = oracle.lm_head.weight.detach()
    assert len(seen.drafts) > 9
    assert max(len(drafts) for _, drafts in seen.drafts) == k

    @torch.no_grad()
    def aux_hidden_states(tokens: list[int]) -> list[torch.Tensor]:
        states = oracle.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return [states[layer + 1][0] for layer in AUX_LAYERS]

    every = seen.by_longest_prefix(aux_hidden_states)
    for known, drafts in seen.drafts:
        residuals = [states[: len(known) - 1] for states in every(known)]
        expected = drafts_of(model, embedding, head, residuals, known[-1], len(drafts))
        assert drafts == expected, len(known)
    plain = LLM(str(folder), skip_tokenizer_init=True, max_model_len=256)
    expected = [o.outputs[0].token_ids for o in plain.generate(REQUESTS, GREEDY)]
    assert [o.outputs[0].token_ids for o in outs] == expected
    assert [o.outputs[0].token_ids for o in again] == expected


def test_auxiliary_layers_are_spread_where_none_are_named(
    targets: dict[str, Any], tmp_path: Path
) -> None:
    folder, _ = targets["Llama"]
    make_block_model(tmp_path / "draft", VOCAB, HIDDEN, [1, 2])
    path = tmp_path / "draft" / "config.json"
    raw = json.loads(path.read_text())
    del raw["dflash_config"]["target_layer_ids"]
    path.write_text(json.dumps(raw))
    seen = RecordedDrafts(create)
    make_engine(folder, tmp_path / "draft", 3, CheckHooks(drafter=seen.create))
    assert seen.context.module.aux_hidden_layers == (2, 3)


def within(**changes: Any) -> dict[str, Any]:
    """Return changes of dflash_config."""
    return {"dflash_config": {"block_size": 4, "mask_token_id": 1, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures=.*DFlash2DraftModel"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"is_causal": True}, "is_causal=True"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash'"),
        (within(causal=True), "dflash_config.causal=True"),
        (within(attention_mode="mla"), "dflash_config.attention_mode='mla'.*'gqa', 'mha'"),
        (within(projector_type="domino"), "dflash_config.projector_type='domino'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_size": 40}, "hidden_size=40.*the target's, 48"),
        ({"vocab_size": VOCAB + 1}, "vocab_size=.*the target's"),
        ({"num_target_layers": 7}, "num_target_layers=7.*the target's, 5"),
        ({"dflash_config": {"block_size": 16}}, "dflash_config.mask_token_id"),
        ({"dflash_config": {"block_size": 16, "mask_token_id": VOCAB}}, "mask_token_id=.* 0 to"),
        ({"dflash_config": {"block_size": 1, "mask_token_id": 1}}, "block_size=1.*2 or more"),
        ({"dflash_config": {"mask_token_id": 1}}, "block_size"),
        (
            within(target_layer_ids=[3, 1]),
            "target_layer_ids=.*ascending numbers of layers, 0 to 4",
        ),
        (within(output_multiplier=0.2), "output_multiplier=0.2"),
    ],
)
def test_unsupported_settings_are_refused(
    targets: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    make_block_model(tmp_path / "draft", VOCAB, HIDDEN, AUX_LAYERS, **changes)
    with pytest.raises(CheckpointError, match=f"draft/config.json .*{message}"):
        make_engine(targets["Llama"][0], tmp_path / "draft", 3)


def test_drafts_beyond_block_size_are_refused(targets: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = targets["Llama"]
    make_block_model(tmp_path / "draft", VOCAB, HIDDEN, AUX_LAYERS, inner=False, block_size=8)
    with pytest.raises(
        ConfigError, match="num_speculative_tokens=8 is not allowed; allowed: 1 to 7"
    ):
        make_engine(folder, tmp_path / "draft", 8)


def test_missing_and_spare_tensors_are_refused(targets: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = targets["Llama"]
    tensors = make_block_model(tmp_path / "draft", VOCAB, HIDDEN, AUX_LAYERS)
    kept = {f"model.{n}": t for n, t in tensors.items() if n != "fc.weight"}
    save_file(kept | {"more": torch.ones(2)}, tmp_path / "draft" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors \(1\): fc.weight; spare .*more"):
        make_engine(folder, tmp_path / "draft", BLOCK - 1)
