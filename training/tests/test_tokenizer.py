"""Tests of the tokenizer: a word's tokens do not depend on what precedes it."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from training import tokenizer
from training.corpus.tasks import calls_text


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.train(folder, 400)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "value",
    ["noon", "Weiss", "old_backup.zip", "/etc/hosts", "東京", "A-17", "Ana\u0301lise", "~/x"],
)
def test_a_value_has_the_same_tokens_wherever_it_stands(new: Tokenizer, value: str) -> None:
    alone = new.encode(value).ids
    call = calls_text([("f", {"x": value})])
    for text in (f"see {value} now", f'say "{value}"', f"x={value}", f"(as {value})", call):
        ids = new.encode(text).ids
        windows = [ids[i : i + len(alone)] for i in range(len(ids))]
        assert alone in windows, (text, new.encode(text).tokens)


def test_text_comes_back(new: Tokenizer) -> None:
    for text in ("a  b\n\n  c", "don't x = [1, 2]\n\tif a:\n        pass  ", '{"a": {"b": []}}\n'):
        assert new.decode(new.encode(text).ids) == text


def test_marks_of_a_call_are_one_token_each(new: Tokenizer) -> None:
    marks = ("<function=", "<parameter=", "</parameter>\n", "</function>\n")
    assert all(len(new.encode(mark).ids) == 1 for mark in marks)


def test_an_embedding_is_carried_over_by_spelling(new: Tokenizer) -> None:
    table = torch.randn(new.get_vocab_size(), 4)
    torch.testing.assert_close(tokenizer.transfer_embedding(table, new, new), table)
    old = Tokenizer.from_str(new.to_str())
    old.add_tokens(["nooon"])
    wider = torch.cat([table, torch.ones(1, 4)])
    carried = tokenizer.transfer_embedding(wider, old, new)
    torch.testing.assert_close(carried, table)


def test_a_token_that_was_not_there_is_the_mean_of_its_pieces() -> None:
    known = {"n": 0, "o": 1, "no": 2, "\u0120no": 3}
    assert tokenizer._pieces("noon", known) == [2, 1, 0]
