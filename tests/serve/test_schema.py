"""Requests made from the server's own schema: none may fail the server or break its promises."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lockstep.serve.app import create_app
from lockstep.serve.service import Service
from lockstep.text.processor import Processor
from tests.serve.fake import FakeClient


def not_failed(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    """No 5xx but 504, which a request asks for by its own `timeout`."""
    assert response.status_code < 500 or response.status_code == 504


CHECKS = [
    not_failed,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 250
"""For each of eight operations: 2,000 in all."""


@pytest.fixture(scope="module")
def api(processor: Processor) -> schemathesis.BaseSchema:
    assert processor.tokenizer is not None
    script = [
        *processor.tokenizer.encode("hello fox"),
        processor.tokenizer.fast.token_to_id("<|im_end|>"),
    ]
    client = FakeClient(lambda request: script)
    app = create_app(Service(client, processor, "tiny", "ls-test"))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


PATHS = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/health": "GET",
    "/metrics": "GET",
}


def test_every_path_is_attacked(api: schemathesis.BaseSchema) -> None:
    assert set(api.raw_schema["paths"]) == set(PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_requests_made_from_the_schema(api: schemathesis.BaseSchema, path: str) -> None:
    @given(case=api[path][PATHS[path]].as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def attack(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    attack()
