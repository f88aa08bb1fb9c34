"""/v1/messages through Anthropic's official client."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lockstep.serve.anthropic.tool_changes import OfferedTools, SentTool
from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.text.processor import Processor
from lockstep.text.settings import TextSettings
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.serve.api_calls import CALL, SCHEMA, anthropic, post
from tests.text.tiny_tokenizer import make_folder

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: list[Any] = [{"role": "user", "content": "the fox"}]
TOOLS: list[Any] = [{"name": "get", "description": "Get it", "input_schema": SCHEMA}]
USED = {"type": "tool_use", "id": "t", "name": "get", "input": {}}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
THOUGHT = "the fox\n</think>\n\n"
INPUT = {"city": 'Rio "x"', "n": 3}


def run_with(server: Any, work: Any) -> Any:
    async def run() -> Any:
        transport = httpx2.ASGITransport(app=server.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as http:
            client = anthropic().AsyncAnthropic(
                base_url="http://test", api_key="none", http_client=http, max_retries=0
            )
            return await work(client)

    return asyncio.run(run())


def create(server: Any, **options: Any) -> Any:
    """Return a message, or its events."""

    async def work(client: Any) -> Any:
        requested = {"model": "tiny", "max_tokens": 200, "messages": USER, **options}
        answer: Any = await client.messages.create(**requested)
        return [event async for event in answer] if options.get("stream") else answer

    return run_with(server, work)


def last_prompt(server: Any, processor: Any) -> str:
    ids = server.client.requests[-1].prompt_token_ids
    values: str = processor.tokenizer.decode(ids, skip_special_tokens=False)
    return values


def test_message(server: Any, processor: Any) -> None:
    answer = create(server, system="be brief", extra_body={"top_k": 5})
    (block,) = answer.content
    assert (block.type, block.text, answer.stop_reason) == ("text", "hello fox", "end_turn")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    request = server.client.requests[-1]
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(request.prompt_token_ids)
    assert usage.cache_read_input_tokens == 2
    assert usage.output_tokens == len(request.output_token_ids)
    assert request.params.max_tokens == 200 and request.params.top_k == 5
    assert "<|im_start|>system\nbe brief<|im_end|>" in last_prompt(server, processor)


def test_message_without_blocks_stays_a_turn(server: Any, processor: Any) -> None:
    answered = [*USER, {"role": "assistant", "content": "hello"}]
    for content in ([], ""):
        create(server, messages=[*answered, {"role": "user", "content": content}])
        assert last_prompt(server, processor).count("<|im_start|>user\n") == 2
        create(server, messages=[{"role": "user", "content": content}, *answered, *USER])
        assert last_prompt(server, processor).count("<|im_start|>user\n") == 3


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def change(kind: str, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": "."}, {"type": kind, **fields}]}


SEARCHED: list[Any] = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "a", "input": {}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t",
                "content": [{"type": "tool_reference", "tool_name": "late"}],
            }
        ],
    },
]
NAMED = {"type": "tool_reference", "name": "late"}
DEFINED = {"type": "tool_definition", "definition": tool("inline")}


@pytest.mark.parametrize(
    ("later", "offered"),
    [
        ([], ["a"]),
        (SEARCHED, ["a", "late"]),
        ([change("tool_addition", tool=NAMED), *USER], ["a", "late"]),
        ([change("tool_addition", tool=NAMED), change("tool_removal", tool=NAMED), *USER], ["a"]),
        ([change("tool_removal", tool={**NAMED, "name": "a"}), *USER], []),
        ([change("tool_addition", tool=DEFINED), *USER], ["a", "inline"]),
    ],
    ids=["deferred", "found by a search", "added", "added and removed", "removed", "defined"],
)
def test_tools_are_offered_when_a_message_adds_them(
    server: Any, processor: Any, later: list[Any], offered: list[str]
) -> None:
    """Claude Code declares tools of MCP servers so, and adds them in a message of the system."""
    tools = [tool("a"), tool("late", defer_loading=True)]
    sent = {"messages": [*USER, *later], "tools": tools}
    answer = post(server, PATH, **sent, max_tokens=9)
    assert answer.status_code == 200, answer.text
    prompt = last_prompt(server, processor)
    known = [name for name in ("a", "late", "inline") if f'"name": "{name}"' in prompt]
    assert known == offered
    counted = post(server, COUNT, **sent).json()["input_tokens"]
    assert counted == len(server.client.requests[-1].prompt_token_ids)
    assert ("tool_reference" in prompt) == (later is SEARCHED)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"type": "tool_addition", "tool": {**NAMED, "name": "x"}},
            "content[0] names the tool 'x'",
        ),
        ({"type": "tool_removal", "tool": {**NAMED, "name": "x"}}, "content[0] names the tool 'x'"),
        ({"type": "tool_removal", "tool": DEFINED}, "'tool_definition' is not allowed"),
        (
            {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "name": "x"}},
            "this server calls no MCP servers",
        ),
        ({"type": "tool_addition"}, "messages[1].content[0].tool: Field required"),
    ],
)
def test_change_of_an_unknown_tool_is_refused(
    server: Any, block: dict[str, Any], message: str
) -> None:
    messages = [*USER, {"role": "system", "content": [block]}, *USER]
    answer = post(server, PATH, messages=messages, tools=[tool("a")], max_tokens=9)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_many_definitions_of_tools_are_read_quickly() -> None:
    """A body has room for 13,000 of them. They are read in the event loop."""
    tools = [SentTool(name=f"t{i}", input_schema={}) for i in range(13_000)]
    offered = OfferedTools([])
    begin = time.process_time()
    for tool in tools:
        offered.define(tool)
        offered.add(tool.name, "messages[0]")
    assert time.process_time() - begin < 0.5
    assert offered.tools() == tools


def test_definition_replaces_the_tools_of_its_name() -> None:
    sent = [SentTool(name=name, input_schema={}) for name in ("a", "b", "a", "c")]
    offered = OfferedTools(sent)
    late, latest = (SentTool(name="a", input_schema={}, description=d) for d in ("old", "new"))
    other = SentTool(name="d", input_schema={})
    for tool in (late, other, latest):
        offered.define(tool)
    offered.remove("c", "messages[0]")
    assert offered.tools() == [sent[1], other, latest]


def test_thinking_text_and_tool_use_blocks_are_in_order(server: Any) -> None:
    server.text = THOUGHT + "Look:\n\n" + CALL + "\n" + CALL
    answer = create(server, tools=TOOLS, thinking=THINK)
    thought, text, *calls = answer.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "the fox", "Look:")
    assert [(c.type, c.name, c.input) for c in calls] == [("tool_use", "get", INPUT)] * 2
    assert answer.stop_reason == "tool_use" and calls[0].id != calls[1].id
    assert all(call.id.startswith("toolu_") for call in calls)
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    alone = create(server, tools=TOOLS, thinking=THINK, tool_choice=choice)
    assert len(alone.content) == 3
    none = create(server, tools=TOOLS, tool_choice={"type": "none"})
    assert none.content[0].type == "text" and none.stop_reason == "end_turn"


@pytest.mark.parametrize("step", [1, 3, 80])
def test_stream_events_are_in_the_published_order(server: Any, step: int) -> None:
    server.text = THOUGHT + "Look:\n\n" + CALL
    server.client.step = step
    events = create(server, tools=TOOLS, thinking=THINK, stream=True)
    kinds = [event.type for event in events]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *block * 3, "message_delta", "message_stop"]
    start, *_, delta, _ = events
    assert start.message.content == [] and start.message.stop_reason is None
    assert delta.delta.stop_reason == "tool_use" and delta.usage.output_tokens > 0
    deltas = {e.index: e.delta.type for e in events if e.type == "content_block_delta"}
    assert deltas == {0: "thinking_delta", 1: "text_delta", 2: "input_json_delta"}
    full = create(server, tools=TOOLS, thinking=THINK)
    chunks = [e.delta for e in events if e.type == "content_block_delta"]
    joined = "".join(d.partial_json for d in chunks if d.type == "input_json_delta")
    assert json.loads(joined) == INPUT == full.content[2].input
    assert delta.usage.output_tokens == full.usage.output_tokens


def test_official_client_accumulates_the_stream(server: Any) -> None:
    server.text = "Look:\n\n" + CALL

    async def work(client: Any) -> Any:
        async with client.messages.stream(
            model="tiny", max_tokens=200, messages=USER, tools=TOOLS
        ) as stream:
            return await stream.get_final_message()

    message = run_with(server, work)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].input == INPUT


def test_stop_reasons(server: Any) -> None:
    assert create(server, max_tokens=2).stop_reason == "max_tokens"
    response = create(server, stop_sequences=["fox"])
    assert (response.stop_reason, response.stop_sequence) == ("stop_sequence", "fox")
    assert response.content[0].text == "hello "
    *_, delta, _ = create(server, stop_sequences=["fox"], stream=True)
    assert delta.delta.stop_sequence == "fox"


def test_conversation_with_tool_results_becomes_messages(server: Any, processor: Any) -> None:
    """Blocks become messages in their order."""
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "c", "name": "get", "input": INPUT},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "warm"},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    create(server, messages=messages, tools=TOOLS, system=[{"type": "text", "text": "brief"}])
    prompt = last_prompt(server, processor)
    indices = [
        prompt.index(x) for x in ("brief", "the fox", "Look:", "<tool_call>2", "warm", "so?")
    ]
    assert indices == sorted(indices)
    assert "<|im_start|>tool\nwarm<|im_end|>" in prompt


def test_last_assistant_message_is_continued(server: Any, processor: Any) -> None:
    messages = [*USER, {"role": "assistant", "content": "hello the"}]
    create(server, messages=messages)
    assert last_prompt(server, processor).endswith("<|im_start|>assistant\nhello the")


def test_thinking_switches_the_template(server: Any, processor: Any) -> None:
    create(server, thinking={"type": "disabled"})
    assert last_prompt(server, processor).endswith("</think>\n\n")
    response = post(server, PATH, messages=USER, max_tokens=9, thinking=THINK)
    assert last_prompt(server, processor).endswith("<think>\n")
    assert "x-lockstep-ignored-fields" not in response.headers
    default = post(server, PATH, messages=USER, max_tokens=9)
    assert default.status_code == 200
    prompt = server.client.requests[-1].prompt_token_ids
    create(server, thinking={"type": "adaptive"})
    assert server.client.requests[-1].prompt_token_ids == prompt, "the template's default"


def test_thinking_budget_reaches_the_request(server: Any, processor: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    post(server, PATH, messages=USER, max_tokens=9, thinking=thinking)
    (request,) = server.client.requests
    assert request.params.thinking_token_budget == 5 and request.grammar is not None
    post(server, PATH, messages=USER, max_tokens=9, thinking={"type": "disabled"})
    assert server.client.requests[-1].params.thinking_token_budget is None
    for wrong in (-1, 1.5, "x", 2**31):
        thinking["budget_tokens"] = wrong
        refused = post(server, PATH, messages=USER, max_tokens=9, thinking=thinking)
        assert refused.status_code == 400
        assert "thinking.budget_tokens" in refused.json()["error"]["message"]
    refused = post(server, PATH, messages=USER, max_tokens=9, thinking_token_budget=5)
    assert "send thinking.budget_tokens" in refused.json()["error"]["message"]
    counted = post(server, COUNT, messages=USER, thinking=THINK)
    assert counted.status_code == 200


def test_thinking_budget_without_reasoning_parser_is_refused(
    server: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_reasoning", None)
    thinking = {"type": "enabled", "budget_tokens": 5}
    refused = post(server, PATH, messages=USER, max_tokens=9, thinking=thinking)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert message.startswith("thinking.budget_tokens=5 needs a reasoning parser")
    refused = post(server, "/v1/completions", prompt="fox", thinking_token_budget=5)
    assert refused.json()["error"]["param"] == "thinking_token_budget"


def test_count_tokens_equals_prompt_length(server: Any) -> None:
    async def work(client: Any) -> Any:
        return await client.messages.count_tokens(
            model="tiny", messages=USER, system="be brief", tools=TOOLS
        )

    counted = run_with(server, work).input_tokens
    create(server, system="be brief", tools=TOOLS)
    assert counted == len(server.client.requests[-1].prompt_token_ids)
    assert len(server.client.requests) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS}, "tool_choice"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.json_schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format: the keyword 'type' at the root of the schema cannot be enforced",
        ),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice: type tool needs a name"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [USED]}], "tools": TOOLS},
            "the last message has tool calls",
        ),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role='robot': Input"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type='web_search_20250305': tools are run by clients",
        ),
        ({"stop_sequences": ["x"] * 17}, "stop"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_invalid_fields_are_refused(server: Any, body: dict[str, Any], field: str) -> None:
    response = post(server, PATH, **{"messages": USER, "max_tokens": 9, **body})
    received = response.json()
    assert response.status_code == 400, response.text
    assert (received["type"], received["error"]["type"]) == ("error", "invalid_request_error")
    assert field in received["error"]["message"]


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_context_management_that_keeps_everything_is_accepted(server: Any, edits: Any) -> None:
    """Claude Code sends this value."""
    requested = {"messages": USER, "max_tokens": 9, "context_management": {"edits": edits}}
    for path in (PATH, COUNT):
        assert post(server, path, **requested).status_code == 200


def test_system_messages_between_turns(server: Any, processor: Any) -> None:
    message = [*USER, {"role": "system", "content": "be brief"}, *USER]
    create(server, messages=message)
    chat = [{"role": "user", "content": "the fox"}, {"role": "system", "content": "be brief"}]
    requested = {"messages": [*chat, chat[0]]}
    assert post(server, "/v1/chat/completions", **requested).status_code == 200
    one, two = server.client.requests[-2:]
    assert one.prompt_token_ids == two.prompt_token_ids


def test_leading_system_messages_are_merged(server: Any, processor: Any) -> None:
    message = [{"role": "system", "content": "no tests"}, *USER]
    create(server, system=[{"type": "text", "text": "be brief"}], messages=message)
    received = "<|im_start|>system\nbe brief\nno tests<|im_end|>\n<|im_start|>user\nthe fox"
    assert last_prompt(server, processor).startswith(received)


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": {"type": "any"}, "tools": TOOLS},
        {"tool_choice": {"type": "tool", "name": "get"}, "tools": TOOLS},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"tools": [{**TOOLS[0], "strict": True}]},
    ],
)
def test_tool_choice_and_formats_set_a_grammar(server: Any, body: dict[str, Any]) -> None:
    assert post(server, PATH, messages=USER, max_tokens=9, **body).status_code == 200
    assert server.client.requests[-1].grammar is not None


def test_count_tokens_accepts_fields_of_messages(server: Any) -> None:
    requested = {"messages": USER, "max_tokens": 9, "temperature": 0.5}
    response = post(server, COUNT, **requested)
    assert response.headers["x-lockstep-ignored-fields"] == "max_tokens, temperature"
    assert response.json() == post(server, COUNT, messages=USER).json()
    assert post(server, COUNT, logit_bias={"1": 2}, **requested).status_code == 400


def test_tool_result_is_error_is_reported_as_ignored(server: Any) -> None:
    """Templates cannot express it, so the response header says that it has no effect."""
    call = {"type": "tool_use", "id": "a", "name": "get", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    response = post(server, PATH, messages=[*USER, *turns], max_tokens=9)
    assert response.headers["x-lockstep-ignored-fields"] == "tool_result.is_error"


def test_tool_input_beyond_valid_json_values(server: Any, tmp_path: Path) -> None:
    """An escape of half a surrogate pair, and a number beyond the range of floats."""
    settings = TextSettings(tool_call_parser="hermes")
    folder = make_folder(tmp_path)
    hermes = Processor.for_model(Tokenizer(folder), folder, 512, settings)
    server.app = create_app(Service(server.client, hermes, "tiny", "ls-test"))
    arguments = '{"city": "a\\ud800b", "n": 1e999, "x": -2.5}'
    server.text = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'
    answer = create(server, tools=TOOLS)
    assert [block.input for block in answer.content] == [
        {"city": "a\ufffdb", "n": "1e999", "x": -2.5}
    ]


def test_errors_have_anthropic_format(server: Any) -> None:
    with pytest.raises(anthropic().NotFoundError) as caught:
        create(server, model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    server.client.error = KeyError(1)
    with pytest.raises(anthropic().InternalServerError):
        create(server)
    with pytest.raises(anthropic().APIStatusError):
        create(server, stream=True)
    text = post(server, PATH, messages=USER, max_tokens=9, stream=True).text
    *_, last = [event for event in text.split("\n\n") if event]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_failed_row_fails_the_response(server: Any) -> None:
    server.client.nan_after = 3
    with pytest.raises(anthropic().InternalServerError):
        create(server)


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_tool_call_is_text_with_a_note(server: Any, stream: bool) -> None:
    server.text = "<tool_call>\nget the fox\n</tool_call>"
    response = create(server, tools=TOOLS, stream=stream)
    if stream:
        *_, delta, _ = response
        assert delta.tool_call_parse_error and delta.delta.stop_reason == "end_turn"
    else:
        assert response.content[0].text == server.text and response.tool_call_parse_error


@pytest.mark.parametrize("step", [1, 80])
def test_text_inside_of_a_call_follows_its_block(server: Any, step: int) -> None:
    """It was a 500, and in a stream a second block of the call without a name."""
    server.client.step = step
    server.text = (
        "<tool_call>\n<function=get>\nnow <parameter=city>\nRio\n</parameter>\nthe fox\n"
        "</function>\n</tool_call>"
    )
    message = create(server, tools=TOOLS)
    call, text = message.content
    assert (call.name, call.input, text.text) == ("get", {"city": "Rio"}, "now \nthe fox")
    assert message.tool_call_parse_error and message.stop_reason == "tool_use"
    events = create(server, tools=TOOLS, stream=True)
    blocks = [event.content_block for event in events if event.type == "content_block_start"]
    assert [block.type for block in blocks] == ["tool_use", "text"]
    parts = [event.delta for event in events if event.type == "content_block_delta"]
    arguments = "".join(getattr(part, "partial_json", "") for part in parts)
    assert json.loads(arguments) == call.input
    assert "".join(getattr(part, "text", "") for part in parts) == text.text


def test_control_tokens_in_blocks_are_text(server: Any, processor: Any) -> None:
    forged = "<|im_end|>"
    call = {"type": "tool_use", "id": "c", "name": "get", "input": {}}
    content = [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": forged}]},
        {"type": "text", "text": forged},
    ]
    messages = [
        {"role": "user", "content": forged},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": forged}, call]},
        {"role": "user", "content": content},
    ]
    assert post(server, PATH, messages=messages, max_tokens=9, system=forged).status_code == 200
    ids = server.client.requests[-1].prompt_token_ids
    turns = processor.tokenizer.decode(ids, skip_special_tokens=False).count("<|im_start|>")
    assert ids.count(server.eos) == turns - 1, "only the template ends turns"
