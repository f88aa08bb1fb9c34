"""The bundled model, as the tests of requests and of sampling parameters ask it."""

from typing import Any

import pytest

from lockstep import LLM
from tests.asking import assert_idle, make_engine


@pytest.fixture(scope="module")
def engine() -> LLM:
    """The bundled model, drafting with its own module."""
    return make_engine("mtp")


@pytest.fixture
def llm(engine: LLM) -> Any:
    """The engine; afterwards nothing of a request is left in it."""
    yield engine
    assert_idle(engine)


@pytest.fixture(scope="module")
def plain() -> LLM:
    """The bundled model without drafts."""
    return make_engine(None)
