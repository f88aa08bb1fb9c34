"""Bodies of /v1/messages: fields that have no effect are listed."""

from typing import Any

import pytest

from lockstep.serve.anthropic.protocol import CountRequest

CLIENT = (
    {"type": "tool_use", "id": "a", "name": "get", "input": {}},
    {"type": "tool_result", "tool_use_id": "a", "content": "no"},
    "tool_result.is_error",
)
SERVER = (
    {"type": "mcp_tool_use", "id": "a", "name": "get", "server_name": "files", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "a", "content": "no"},
    "mcp_tool_result.is_error",
)


@pytest.mark.parametrize(("call", "result", "name"), [CLIENT, SERVER], ids=["client", "server"])
@pytest.mark.parametrize("is_error", [True, False])
def test_failed_tool_results_are_listed_as_ignored(
    call: dict[str, Any], result: dict[str, Any], name: str, is_error: bool
) -> None:
    """No template can express is_error, whoever ran the tool."""
    role = "user" if result["type"] == "tool_result" else "assistant"
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [call]},
        {"role": role, "content": [{**result, "is_error": is_error}]},
    ]
    body = CountRequest.model_validate({"messages": messages})
    assert body.ignored_fields() == ([name] if is_error else [])
