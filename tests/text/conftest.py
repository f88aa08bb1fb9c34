"""The tiny tokenizer, built once, and hypothesis without deadlines."""

from pathlib import Path

import pytest
from hypothesis import settings

from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import make_folder

# An example's time says how busy the machine is, not whether the answer is right.
settings.register_profile("no_clock", deadline=None)
settings.load_profile("no_clock")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def processor(folder: Path, tokenizer: Tokenizer) -> Processor:
    return Processor.for_model(tokenizer, folder, 512)
