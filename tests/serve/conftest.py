"""A service over the fake engine client, and official clients of it."""

from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.serve.fake_client import FakeClient
from tests.text.tiny_tokenizer import make_folder


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder: Path = make_folder(tmp_path_factory.mktemp("tiny"))
    return Processor.for_model(Tokenizer(folder), folder, 512)


@pytest.fixture
def server(processor: Processor) -> SimpleNamespace:
    """Return a server whose `text` is its answer; `openai()` and `http()` give clients, for `async
    with`."""
    eos = processor.tokenizer.fast.token_to_id("<|im_end|>")
    result = SimpleNamespace(text="hello fox", eos=eos)
    result.client = FakeClient(lambda request: [*processor.tokenizer.encode(result.text), eos])
    result.app = create_app(Service(result.client, processor, "tiny", "ls-test"))

    def http() -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=result.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    result.http = http
    result.openai = lambda: openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http(), max_retries=0
    )
    return result
