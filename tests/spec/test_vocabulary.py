"""The tokens that a reduced draft head keeps, and that drafting with it changes no answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import CheckpointError, ConfigError
from lockstep.spec.vocabulary import draft_vocab_size, frequent_tokens
from lockstep.worker.build import find_model
from lockstep.worker.executor import worker_of
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, make_engine
from tests.tiny_model import make_model

DRAFT_VOCAB = 2048


def write(folder: Path, merges: list[Any], ids: dict[str, int], **more: Any) -> Path:
    """Write a tokenizer with these merges into the folder."""
    tokenizer = {"model": {"vocab": ids, "merges": merges}, "added_tokens": [{"id": 90}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, content in more.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("joined", [True, False])
def test_frequent_tokens_follow_merge_order(tmp_path: Path, joined: bool) -> None:
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]
    listed = [" ".join(m) for m in merges] if joined else merges
    ids = {"a": 5, "b": 6, "c": 7, "abc": 10, "ab": 11, "bc": 12}
    folder = write(
        tmp_path,
        listed,
        ids,
        config={"text_config": {"eos_token_id": 80}},
        generation_config={"eos_token_id": [81, 80]},
        tokenizer_config={"added_tokens_decoder": {"95": {}}},
    )
    added = {80, 81, 90, 95}
    for size, kept in ((8, {5, 6, 7, 12}), (9, {5, 6, 7, 12, 11}), (10, {5, 6, 7, 10, 11, 12})):
        actual = frequent_tokens(folder, size, 100)
        assert actual == sorted(actual) and set(actual) == added | kept
    assert frequent_tokens(folder, 1, 100) == [81], "EOS tokens come first"
    assert frequent_tokens(folder, 12, 100)[:2] == [0, 1], "the rest by id"
    assert set(frequent_tokens(folder, 6, 90)) == {80, 81, 5, 6, 7, 12}, "none past the head"


def test_frequent_tokens_without_tokenizer_are_lowest_ids(tmp_path: Path) -> None:
    assert frequent_tokens(tmp_path, 64, 1000) == list(range(64))


@pytest.mark.parametrize(
    ("requested", "vocab", "size"),
    [
        ("auto", 65536, 65536), ("auto", 65600, 32768), ("full", 248320, 248320),
        (4096, 4096, 4096), (64, 4096, 64),
    ],
)  # fmt: skip
def test_draft_vocab_size(requested: int | str, vocab: int, size: int) -> None:
    assert draft_vocab_size(requested, vocab) == size


def test_draft_vocab_size_above_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab_size=8192 .*up to 4096.*Lower it"):
        make_engine("mtp", draft_vocab_size=8192)


def test_reduced_head_drafts_kept_tokens_and_changes_no_answer() -> None:
    plain = make_engine(None)
    short = make_engine("mtp", draft_vocab_size=DRAFT_VOCAB)
    plan = short.engine.plan
    drafter = worker_of(short.engine).program.drafter
    module = drafter.context.module
    kept = torch.tensor(frequent_tokens(find_model(None), DRAFT_VOCAB, 4096))
    full = worker_of(short.engine).model.head.weight
    assert torch.equal(module.head.weight, full[kept])
    assert (plan.draft_vocab_size, plan.draft_head_bytes) == (DRAFT_VOCAB, DRAFT_VOCAB * 256 * 4)
    seen: set[int] = set()
    propose = drafter.propose

    def watch(*args: Any) -> None:
        propose(*args)
        seen.update(drafter.context.drafts[args[0].row_ids].flatten().tolist())

    drafter.propose = watch
    accepted = 0
    for params in (GREEDY, SEEDED):
        outs = [llm.generate(PROMPTS, params) for llm in (plain, short)]
        for one, other in zip(*outs, strict=True):
            assert answer(one) == answer(other)
        accepted += sum(out.metrics.num_accepted_tokens for out in outs[1])
    assert len(seen) > 20 and seen <= set(kept.tolist()) and accepted > 10


def test_dummy_draft_head_is_reduced(tmp_path: Path) -> None:
    """For a checkpoint folder without a tokenizer."""
    folder = make_model(tmp_path / "model", vocab_size=1024)
    llm = make_engine(
        "mtp", draft_vocab_size=128, model=str(folder), load_format="dummy",
        skip_tokenizer_init=True,
    )  # fmt: skip
    assert worker_of(llm.engine).program.drafter.context.module.head.weight.shape[0] == 128
    assert llm.engine.explain()["plan"]["draft_head_bytes"] == 128 * 48 * 4


@pytest.mark.parametrize(
    "text", ["", "[1]", "[" * 100_000, '{"added_tokens": 5}', '{"model": [1]}']
)
def test_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="which tokens are frequent.*Fetch the files again"):
        frequent_tokens(tmp_path, 64, 128)
