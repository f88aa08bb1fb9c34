"""A draft model drafts its own greedy answer, and the tokens are the target's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import SamplingParams
from lockstep.errors import CheckpointError, ConfigError
from lockstep.llm import LLM
from lockstep.spec import read
from lockstep.spec.draft_model import create
from lockstep.worker.hooks import NO_HOOKS, CheckHooks
from tests.models.dense import VOCAB, make_llm, random_oracle
from tests.spec.blocks import make_block_model
from tests.spec.heads import make_head
from tests.spec.watching import RecordedDrafts
from tests.text.tiny_tokenizer import make_folder
from tests.tiny_model import DEEPSEEK, LLAMA, QWEN3

K = 4
PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (70, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def make_engine(folder: Path, draft: Path, hooks: CheckHooks = NO_HOOKS, **settings: Any) -> LLM:
    """Return an engine of the target in `folder` that drafts with the model in `draft`."""
    spec = {"model": str(draft), "num_speculative_tokens": K, "adaptive": False}
    return make_llm(folder, hooks, max_model_len=256, speculative_config=spec, **settings)


def make_pair(folder: Path, family: str, base: dict[str, Any], **changes: Any) -> Any:
    """Return a random transformers model, saved in the folder with a tokenizer."""
    oracle = random_oracle(folder, family, base, **changes)
    kept = (folder / "config.json").read_text()
    make_folder(folder)
    (folder / "config.json").write_text(kept)
    return oracle


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama of VOCAB tokens."""
    folder = tmp_path_factory.mktemp("target")
    make_pair(folder, "Llama", LLAMA)
    return folder


def greedy(oracle: Any, known: list[int], count: int, vocab: int) -> list[int]:
    """Return transformers' greedy answer after the known tokens, among the first `vocab` tokens."""
    text = list(known)
    for _ in range(count):
        maximum = oracle.config.vocab_size - 1
        with torch.no_grad():
            logits = oracle(torch.tensor([[min(t, maximum) for t in text]])).logits[0, -1]
        text.append(int(logits[:vocab].argmax()))
    return text[len(known) :]


@pytest.mark.default_cases("llama", "fewer tokens")
@pytest.mark.parametrize(
    ("family", "base", "changes"),
    [
        ("Llama", LLAMA, {"num_hidden_layers": 1}),
        ("Qwen3", QWEN3, {}),
        ("DeepseekV3", DEEPSEEK, {"num_hidden_layers": 2}),
        ("Qwen3", QWEN3, {"vocab_size": VOCAB - 40}),
        ("Llama", LLAMA, {"vocab_size": VOCAB + 64, "num_hidden_layers": 1}),
    ],
    ids=["llama", "qwen3", "latent attention", "fewer tokens", "more tokens"],
)
def test_drafts_equal_the_draft_models_greedy_answer(
    target: Path, tmp_path: Path, family: str, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    """At every step, after chunked prompts and accepted drafts."""
    oracle = make_pair(tmp_path, family, base, **changes)
    seen = RecordedDrafts(create)
    hooks = CheckHooks(drafter=seen.create)
    llm = make_engine(target, tmp_path, hooks, max_num_batched_tokens=64)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    assert len(seen.drafts) > 9
    for known, drafts in seen.drafts:
        assert drafts == greedy(oracle, known, K, VOCAB), len(known)
    plain = LLM(str(target), skip_tokenizer_init=True, max_model_len=256)
    expected = plain.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_model_as_its_own_draft_has_no_rejections(target: Path) -> None:
    """The target accepts every draft, also after a prompt with a prefix hit."""
    llm = make_engine(target, target)
    longer = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True, detokenize=False)
    for _ in range(2):
        out = llm.generate({"prompt_token_ids": PROMPTS[0]}, longer)[0]
        assert out.metrics.num_accepted_tokens >= 20
        assert out.metrics.num_draft_tokens - out.metrics.num_accepted_tokens <= K
    assert out.metrics.num_cached_tokens == 64


def test_drafts_across_a_page_boundary_are_batch_independent(target: Path) -> None:
    """A chain of drafts extends past the window: the page that it begins belongs to the row by
    then, and is not the null page, which all rows would share."""
    llm = make_engine(target, target)
    prompts = [[(k * i + i * i) % 250 for i in range(59)] for k in (3, 7, 11, 13)]
    longer = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    for out in llm.generate([{"prompt_token_ids": p} for p in prompts], longer):
        assert out.metrics.num_draft_tokens == out.metrics.num_accepted_tokens > 60


def test_draft_model_with_other_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    make_pair(tmp_path, "Llama", LLAMA, num_hidden_layers=1)
    path = tmp_path / "tokenizer.json"
    valid = json.loads(path.read_text())
    vocab = valid["model"]["vocab"]
    text, other = list(vocab)[40:42]
    changed = dict(vocab)
    changed[text] = vocab[other]
    changed[other] = vocab[text]
    path.write_text(json.dumps(valid | {"model": valid["model"] | {"vocab": changed}}))
    with pytest.raises(ConfigError, match="has another tokenizer than .* token 40 is"):
        make_engine(target, tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        make_engine(target, tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        make_engine(target, tmp_path)


def test_damaged_draft_model_is_refused(target: Path, tmp_path: Path) -> None:
    make_pair(tmp_path, "Llama", LLAMA, num_hidden_layers=1)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="missing tensors"):
        make_engine(target, tmp_path)


def test_drafter_of_another_method_is_refused(target: Path, tmp_path: Path) -> None:
    make_block_model(tmp_path / "blocks", VOCAB, 48, [0, 1])
    make_head(tmp_path / "head", VOCAB, 48)
    make_head(tmp_path / "authors", VOCAB, 48, architectures=["LlamaForCausalLM"])
    make_head(tmp_path / "typeless", VOCAB, 48, model_type=None)
    folders = {"blocks": "dflash", "head": "eagle3", "authors": "eagle3", "typeless": "eagle3"}
    for folder, method in folders.items():
        with pytest.raises(ConfigError, match=f'it is a .*Add "method": "{method}"'):
            make_engine(target, tmp_path / folder)


def test_model_implies_draft_model_method() -> None:
    actual = read({"model": "here", "num_speculative_tokens": 15})
    assert actual is not None
    assert actual.method == "draft_model"
    with pytest.raises(ConfigError, match="model='' is not allowed"):
        read({"method": "draft_model"})
