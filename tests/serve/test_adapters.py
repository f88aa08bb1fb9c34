"""Adapters are models of their own to clients: every API answers by the one that it names."""

import asyncio
from typing import Any

import pytest

from lockstep.cli.serve import check_adapter_names
from lockstep.errors import ConfigError
from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.text.processor import Processor

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
}


@pytest.fixture
def adapted(server: Any, processor: Processor) -> Any:
    """Return the server with an alias of its model and an adapter."""
    service = Service(
        server.client, processor, "tiny", "ls-test", aliases=["small"], adapters=["sql"]
    )
    server.app = create_app(service)
    return server


def post(server: Any, path: str, body: dict[str, Any]) -> Any:
    async def send() -> Any:
        async with server.http() as client:
            return await client.post(path, json=body)

    return asyncio.run(send())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("model", "adapter", "shown"),
    [("sql", "sql", "sql"), ("tiny", "", "tiny"), ("small", "", "tiny")],
)
def test_model_names_the_adapter(
    adapted: Any, path: str, model: str, adapter: str, shown: str
) -> None:
    response = post(adapted, path, BODIES[path] | {"model": model})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == shown
    assert [request.adapter for request in adapted.client.requests] == [adapter]


def test_models_list_adapters_and_refuse_others(adapted: Any) -> None:
    async def read(path: str) -> Any:
        async with adapted.http() as client:
            return await client.get(path)

    listed = asyncio.run(read("/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [
        ("tiny", "tiny"), ("small", "tiny"), ("sql", "tiny"),
    ]  # fmt: skip
    assert asyncio.run(read("/v1/models/sql")).json()["id"] == "sql"
    refused = post(adapted, "/v1/completions", BODIES["/v1/completions"] | {"model": "law"})
    assert refused.status_code == 404 and "'tiny', 'small', 'sql'" in refused.text


def test_adapter_may_not_have_the_name_of_the_model() -> None:
    check_adapter_names({"sql": "a"}, ("tiny",))
    check_adapter_names((), ("tiny",))
    with pytest.raises(ConfigError, match="lora_modules name='tiny' is not allowed"):
        check_adapter_names({"sql": "a", "tiny": "b"}, ("tiny", "small"))
