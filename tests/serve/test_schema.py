"""Requests generated from the server's own schema never fail the server or violate the schema."""

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
from lockstep.serve.requests.service import Service
from lockstep.text.processor import Processor
from tests.serve.fake_client import FakeClient


def not_failed(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    """Allow no 5xx but 504, which a request may cause by its own `timeout`."""
    assert response.status_code < 500 or response.status_code == 504


CHECKS = [
    not_failed,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
QUICK_EXAMPLES = 4
"""Examples per operation in the quick test."""
SLOW_EXAMPLES = 2_000
"""Total examples of all operations in the slow test."""


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


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/chat/completions/{answer_id}"),
    ("DELETE", "/v1/chat/completions/{answer_id}"),
    ("GET", "/v1/completions/{answer_id}"),
    ("DELETE", "/v1/completions/{answer_id}"),
    ("GET", "/v1/messages/{answer_id}"),
    ("DELETE", "/v1/messages/{answer_id}"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("POST", "/invocations"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]


def attack(api: schemathesis.BaseSchema, method: str, path: str, examples: int) -> int:
    """Send up to `examples` generated requests of an operation, and return how many were sent.

    The message of a failure contains its request.
    """
    sent = 0

    @given(case=api[path][method].as_strategy())
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def send(case: schemathesis.Case) -> None:
        nonlocal sent
        sent += 1
        case.call_and_validate(checks=CHECKS)

    send()
    return sent


def test_every_operation_is_fuzzed(api: schemathesis.BaseSchema) -> None:
    paths = api.raw_schema["paths"].items()
    assert {(m.upper(), path) for path, actual in paths for m in actual} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_fuzzed_requests_follow_the_schema(api: Any, method: str, path: str) -> None:
    attack(api, method, path, QUICK_EXAMPLES)


@pytest.mark.slow
def test_many_fuzzed_requests_follow_the_schema(api: Any) -> None:
    """Operations without parameters have one example each, so others need more."""
    sent = sum(attack(api, method, path, SLOW_EXAMPLES // 10) for method, path in OPERATIONS)
    assert sent >= SLOW_EXAMPLES
