"""Trained models have copies of the bundled tokenizer, so that commands can name their folders."""

import pytest

from lockstep.worker.build import find_model
from tests.models.trained import ASSETS

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
FOLDERS = sorted(path.parent.name for path in ASSETS.glob("*/tokenizer.json"))


@pytest.mark.parametrize("name", FOLDERS)
def test_tokenizer_copies_equal_the_bundled_one(name: str) -> None:
    for file in COPIED:
        assert (ASSETS / name / file).read_bytes() == (find_model(None) / file).read_bytes()


def test_tokenizer_copies_exist() -> None:
    assert len(FOLDERS) >= 5
