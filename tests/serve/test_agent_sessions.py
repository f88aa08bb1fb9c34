"""Sessions of coding agents and SDKs, turn by turn, with the bodies that these clients send.

A file of `sessions/` has a client's constant fields and its turns. `add`: entries that the client
adds to the conversation. `results`: results of the tools called in the previous turn. `model`: the
text that the model writes. `shown`, `hidden`: texts that the prompt contains, or does not.
`ignored`: fields that the response header names. `calls`: tools that the answer calls. `returns`:
how the client sends an answer back.
"""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from lockstep.serve.app import create_app
from lockstep.serve.http.errors import TYPE_REMEDIES
from lockstep.serve.openai.responses.protocol import DROPPED_TYPES, AnyItem
from lockstep.serve.requests.service import Limits, Service
from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.serve.api_calls import fetch, post
from tests.serve.openai.responses.test_endpoint import create, last_prompt
from tests.serve.openai.test_official_fields import hints, plain
from tests.text.tiny_tokenizer import make_folder

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SESSIONS = sorted((Path(__file__).parent / "sessions").glob("*.json"))
PAGE = Path(__file__).parents[2] / "docs" / "request_fields.md"
TEMPLATE = """{{ tools | default([], true) | tojson }}<tool_call>
<function=name>
</tool_call>
{% for message in messages -%}
{% if message.role == 'system' and not loop.first %}{{ raise_exception('Too late') }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.reasoning_content }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}<|im_end|>
{% endfor -%}
<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}"""
"""Template that shows the whole conversation."""
OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """Return the tiny model's text processor, with room for sessions and a template that shows them
    whole."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Processor.for_model(Tokenizer(folder), folder, 16384)


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def items_of(answer: Any) -> list[dict[str, Any]]:
    """Return the output of a response, as its stream's items or as a whole."""
    if answer.headers["content-type"].startswith("application/json"):
        output: list[dict[str, Any]] = answer.json()["output"]
        return output
    events = events_of(answer.text)
    assert events[-1]["type"] == "response.completed", events[-1]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return done


def returned(item: dict[str, Any], how: str) -> dict[str, Any]:
    """Return an item as the client sends it in the next turn."""
    if how == "whole":
        return item
    if how == "without_ids":
        return {key: value for key, value in item.items() if key != "id"}
    if item["type"] == "function_call":
        return {key: item[key] for key in ("type", "call_id", "name", "arguments")}
    return {"type": "item_reference", "id": item["id"]}


def result_of(item: dict[str, Any], result: Any) -> dict[str, Any]:
    """Return the result of a call as an item."""
    fields = result if isinstance(result, dict) else {"output": result}
    return {"type": OUTPUTS[item["type"]], "call_id": item["call_id"], **fields}


def blocks_of(answer: Any) -> list[dict[str, Any]]:
    """Return the content of a message from its stream."""
    blocks: list[dict[str, Any]] = []
    for event in events_of(answer.text):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "json")
            blocks[-1][field] += delta.get("partial_json", delta.get(field))
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return blocks


def next_entries(path: str, message: list[dict[str, Any]], turn: Any, how: str) -> list[Any]:
    """Return what the client adds to the conversation: the answer, results, and the turn's own."""
    results = turn.get("results", [])
    if path == RESPONSES:
        calls = [item for item in message if item["type"] in OUTPUTS]
        values = [returned(item, how) for item in message]
        values += map(result_of, calls, results)
        return [*values, *turn.get("add", [])]
    values = [{"role": "assistant", "content": message}] if message else []
    uses = [block["id"] for block in message if block["type"] == "tool_use"]
    user_content = [
        {"type": "tool_result", "tool_use_id": use, "content": result}
        for use, result in zip(uses, results, strict=True)
    ]
    return [
        *values,
        *([{"role": "user", "content": user_content}] if user_content else []),
        *turn.get("add", []),
    ]


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_agent_session(server: Any, processor: Any, path: Path) -> None:
    session = json.loads(path.read_text())
    conversation: list[Any] = []
    message: list[dict[str, Any]] = []
    for turn in session["turns"]:
        conversation += next_entries(session["path"], message, turn, session["returns"])
        server.text = turn["model"]
        body = {**session["body"], session["list"]: conversation}
        answer = post(server, session["path"], **body)
        assert answer.status_code == 200, answer.text
        prompt = last_prompt(server, processor)
        last = prompt.rindex("<|im_start|>user") if "add" in turn else 0
        for text in turn["shown"]:
            assert json.dumps(text, ensure_ascii=False)[1:-1] in prompt or text in prompt, text
        assert last < prompt.index(turn["shown"][-1], last)
        for text in turn.get("hidden", []):
            assert text not in prompt
        ignored = answer.headers.get("x-lockstep-ignored-fields")
        assert ignored == turn.get("ignored", ignored)
        message = items_of(answer) if session["path"] == RESPONSES else blocks_of(answer)
        for name, item in zip(turn.get("calls", []), message, strict=False):
            assert name == f"{item['namespace']} {item['name']}"


def list_input_items(server: Any, response_id: str) -> list[dict[str, Any]]:
    """Return the input items of a response."""
    answer = fetch(server, "GET", f"{RESPONSES}/{response_id}/input_items?order=asc")
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


SHELL = (
    '<tool_call>\n<function=local_shell>\n<parameter=command>\n["ls"]\n</parameter>\n</function>\n'
    "</tool_call>"
)


@pytest.mark.parametrize("stream", [False, True])
def test_call_of_api_defined_tool_is_an_item(server: Any, stream: bool) -> None:
    server.text = SHELL
    answer = create(server, tools=[{"type": "local_shell"}], stream=stream)
    if stream:
        kinds = [event.type for event in answer]
        assert kinds[2:4] == ["response.output_item.added", "response.output_item.done"]
        assert answer[2].item.action.command == []
        answer = answer[-1].response
    (item,) = answer.output
    assert (item.type, item.status, item.action.command) == (
        "local_shell_call",
        "completed",
        ["ls"],
    )
    assert item.id.startswith("lsh_") and item.call_id.startswith("call_")
    assert server.client.requests[-1].grammar is not None
    following = create(server, previous_response_id=answer.id, input="and?")
    (_, call, _) = list_input_items(server, following.id)
    assert call["type"] == "local_shell_call" and call["action"]["command"] == ["ls"]


def test_truncated_shell_call_has_no_command(server: Any, processor: Any) -> None:
    server.text = SHELL
    maximum = len(processor.tokenizer.encode(SHELL)) - 5
    answer = create(server, tools=[{"type": "local_shell"}], max_output_tokens=maximum)
    (item,) = answer.output
    assert (item.type, item.status) == ("local_shell_call", "incomplete")
    assert item.action.command == []
    following = create(server, previous_response_id=answer.id, input="and?")
    assert [item.get("content") for item in list_input_items(server, following.id)] == [
        [{"type": "input_text", "text": "the fox"}],
        [{"type": "input_text", "text": "and?"}],
    ]


def test_client_side_tool_search(server: Any, processor: Any) -> None:
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Searches tools",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    }
    server.text = (
        "<tool_call>\n<function=tool_search>\n<parameter=query>\nmail\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    (item,) = create(server, tools=[search]).output
    assert (item.type, item.execution, item.arguments) == (
        "tool_search_call",
        "client",
        {"query": "mail"},
    )
    assert "Searches tools" in last_prompt(server, processor)


@pytest.mark.parametrize("name", ["local_shell", "shell", "apply_patch"])
def test_tool_choice_names_api_defined_tool(server: Any, name: str) -> None:
    tools = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
    response = post(server, RESPONSES, input="x", tools=tools, tool_choice={"type": name})
    assert response.status_code == 200, response.text
    assert f"<function={name}>" in server.client.requests[-1].params.structured_outputs.grammar


def test_item_reference_is_resolved(server: Any, processor: Any) -> None:
    first = create(server)
    (item,) = first.output
    reference = {"type": "item_reference", "id": item.id}
    body = [{"role": "user", "content": "a"}, {"id": item.id}, {"role": "user", "content": "b"}]
    second = create(server, input=body)
    assert "hello fox" in last_prompt(server, processor)
    assert list_input_items(server, second.id)[1]["content"][0]["text"] == "hello fox"
    for items, status, received in [
        ([reference, reference], 400, f"input[0].id='{item.id}' is there twice"),
        ([{**reference, "id": "msg_1_0"}], 404, "input[0].id='msg_1_0' is not known"),
        ([{**reference, "id": "x"}], 404, "store: false"),
        ([{**reference, "id": item.id[:-1] + "7"}], 404, "is not known"),
    ]:
        response = post(server, RESPONSES, input=items)
        assert response.status_code == status, response.text
        assert received in response.json()["error"]["message"]


def test_item_references_outlive_earlier_responses(server: Any, processor: Any) -> None:
    """Only the latest response of the conversation is still stored."""
    service = Service(server.client, processor, "tiny", "ls-test", Limits(max_stored_responses=1))
    server.app = create_app(service)
    conversation: list[Any] = []
    for text in ("hello fox", "lazy dog", "quick brown"):
        conversation.append({"role": "user", "content": "a"})
        server.text = text
        answer = create(server, input=conversation)
        conversation.append({"type": "item_reference", "id": answer.output[0].id})
    prompt = last_prompt(server, processor)
    assert "hello fox" in prompt and "lazy dog" in prompt


def test_reasoning_summary_replaces_missing_content(server: Any, processor: Any) -> None:
    summary = [{"type": "summary_text", "text": "shorter"}]
    content = [{"type": "reasoning_text", "text": "whole"}]
    for item, received in (
        ({"summary": summary}, "shorter"),
        ({"summary": summary, "content": content}, "whole"),
    ):
        items = [{"role": "user", "content": "a"}, {"type": "reasoning", **item}]
        create(server, input=items)
        prompt = last_prompt(server, processor)
        assert [text in prompt for text in ("shorter", "whole")] == [
            received == "shorter",
            received == "whole",
        ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "compaction"}]},
            "input[1]: type='compaction' is not supported: only the server that wrote this",
        ),
        ({"input": [{"type": "computer_call"}]}, "this server reads text only"),
        ({"input": [{"type": "nonsense"}]}, "Leave it out."),
        ({"tools": [{"type": "web_search"}]}, 'web_search = "disabled"'),
        (
            {"tools": [{"type": "web_search", "external_web_access": True}]},
            "tools[0].external_web_access=True: this server does not search the web",
        ),
        ({"tools": [{"type": "image_generation"}]}, "features.image_generation = false"),
        ({"tools": [{"type": "tool_search"}]}, "tools[0].execution='server': this server searches"),
        (
            {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
            "tools[0].environment.type='container_auto': this server runs no containers",
        ),
        (
            {"text": {"verbosity": "low"}},
            "text.verbosity='low' is not supported: ask",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_image", "image_url": "data:"}],
                    }
                ]
            },
            "tools.view_image = false",
        ),
    ],
)
def test_responses_error_names_path_and_remedy(server: Any, body: Any, message: str) -> None:
    response = post(server, RESPONSES, **{"input": "x", **body})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"], response.text


LATE: list[Any] = [
    {"role": "system", "content": "first"},
    {"role": "user", "content": "a"},
    {"role": "system", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
]
REMINDER = "<|im_start|>user\n<system-reminder>\nb\nc\n</system-reminder><|im_end|>\n"
SHOWN = (
    "<|im_start|>system\nfirst<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
    + REMINDER
    + "<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\ne<|im_end|>\n"
)


def test_late_system_message_becomes_one_of_the_user(server: Any, processor: Any) -> None:
    """Claude Code sends one in every session, and the templates of Qwen3.5 and 3.6 refuse them."""
    sent = {"system": "first", "messages": LATE[1:]}
    assert post(server, MESSAGES, **sent, max_tokens=9).status_code == 200
    assert SHOWN in last_prompt(server, processor)
    counted = post(server, f"{MESSAGES}/count_tokens", **sent).json()["input_tokens"]
    assert counted == len(server.client.requests[-1].prompt_token_ids)
    # The prompt only grows, so that its prefix stays cached.
    before = last_prompt(server, processor).removesuffix("<|im_start|>assistant\n")
    more = [*LATE[1:], {"role": "assistant", "content": "f"}, LATE[2]]
    assert post(server, MESSAGES, system="first", messages=more, max_tokens=9).status_code == 200
    assert last_prompt(server, processor).startswith(before)
    inputs = [{**item, "content": "b\nc"} if item is LATE[2] else item for item in LATE]
    for role in ("system", "developer"):
        items = [{**i, "role": role} if i["role"] == "system" else i for i in inputs]
        assert post(server, RESPONSES, input=items).status_code == 200
        assert SHOWN in last_prompt(server, processor)


def test_late_system_message_of_a_chat_is_refused(server: Any) -> None:
    response = post(server, "/v1/chat/completions", messages=LATE)
    message = response.json()["error"]["message"]
    assert message.startswith("messages[2].role='system': the chat template refuses")


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "web_fetch_tool_result",
                        "tool_use_id": "a",
                        "content": {"type": "x", "source": {"type": "base64", "data": "AA"}},
                    }
                ],
            },
            "messages[1].content[0].content: this server reads text only",
        ),
        ({"role": "user", "content": [{"type": "document"}]}, "messages[1].content[0]: type='doc"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[1].content[0].text: Field required",
        ),
    ],
)
def test_messages_error_names_path(server: Any, path: str, entry: Any, message: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, entry]}
    body |= {"max_tokens": 9} if path == MESSAGES else {}
    response = post(server, path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(message), response.text


def test_page_documents_every_item() -> None:
    """The page lists all items of OpenAI's library and of this server."""
    from openai.types.responses.response_input_item_param import ResponseInputItemParam

    official = {
        tag
        for kind in get_args(ResponseInputItemParam)
        for tag in get_args(plain(hints(kind).get("type"))) or ("message",)
        if isinstance(tag, str)
    }
    here = {tag for k in get_args(AnyItem) for tag in get_args(k.model_fields["type"].annotation)}
    section = PAGE.read_text().partition("## Items of `/v1/responses`\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    shown = {kind.strip(" `"): why for kinds, why in rows for kind in kinds.split(",")}
    assert official - shown.keys() - {"message"} == set()
    assert {kind for kind, why in shown.items() if "400" not in why} == here
    assert {kind for kind, why in shown.items() if "dropped" in why} == set(DROPPED_TYPES)
    assert {kind for kind, why in shown.items() if "400" in why} <= TYPE_REMEDIES.keys()
