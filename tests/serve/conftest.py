"""A service over the fake engine client, and official clients of it."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from fastapi import FastAPI

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


class CurrentService:
    """The service of the current test, in whose place the routes of a shared application call it.

    Routes are built once per process: those of one application take FastAPI 15 ms.
    """

    def __init__(self) -> None:
        vars(self)["service"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["service"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["service"], name, value)

    def replace(self, service: Service) -> None:
        """Let the routes call this service."""
        vars(self)["service"] = service


CURRENT_SERVICE = CurrentService()


@cache
def shared_app() -> FastAPI:
    """Return an application that calls CURRENT_SERVICE."""
    return create_app(cast(Service, CURRENT_SERVICE))


@pytest.fixture
def server(processor: Processor) -> SimpleNamespace:
    """Return a server whose `text` is its answer; `openai()` and `http()` give clients, for `async
    with`."""
    eos = processor.tokenizer.fast.token_to_id("<|im_end|>")
    result = SimpleNamespace(text="hello fox", eos=eos)
    result.client = FakeClient(lambda request: [*processor.tokenizer.encode(result.text), eos])
    CURRENT_SERVICE.replace(Service(result.client, processor, "tiny", "ls-test"))
    result.app = shared_app()

    def http() -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=result.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    result.http = http
    result.openai = lambda: openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http(), max_retries=0
    )
    return result
