"""Namespaces and custom tools of /v1/responses, as coding agents declare, call and repeat them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.serve.app import create_app
from lockstep.serve.openai.responses.client_tools import InputDecoder
from lockstep.serve.requests.service import Service
from lockstep.text.processor import Processor
from lockstep.text.settings import TextSettings
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.serve.api_calls import SCHEMA, fetch, post
from tests.serve.openai.responses.test_endpoint import create, last_prompt
from tests.text.grammars.test_structured_output import matches
from tests.text.tiny_tokenizer import make_folder

PATH = "/v1/responses"
NOTES: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "Notes of the user",
    "tools": [{"type": "function", "name": "find", "parameters": SCHEMA, "strict": False}],
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Change a file"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
FIND = (
    "<tool_call>\n<function=mcp__notes__find>\n<parameter=city>\nRio\n</parameter>\n"
    "</function>\n</tool_call>"
)
TEXT = '*** Begin "x"\n+\té\\n'
WRITE = (
    f"<tool_call>\n<function=patch>\n<parameter=input>\n{TEXT}\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """Return the tiny model's text processor with room for several tools."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"))
    return Processor.for_model(Tokenizer(folder), folder, 4096)


@pytest.mark.parametrize("step", [1, 3, 80])
def test_calls_have_the_clients_names(server: Any, step: int) -> None:
    server.text = f"{FIND}\n{WRITE}"
    server.client.step = step
    actual, custom_call = create(server, tools=[NOTES, PATCH]).output
    assert (actual.type, actual.namespace, actual.name) == ("function_call", "mcp__notes", "find")
    assert json.loads(actual.arguments) == {"city": "Rio"}
    assert (custom_call.type, custom_call.name, custom_call.input) == (
        "custom_tool_call",
        "patch",
        TEXT,
    )
    events = create(server, tools=[NOTES, PATCH], stream=True)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == TEXT == done.input
    assert [item.type for item in events[-1].response.output] == [actual.type, custom_call.type]


def test_session_continues_with_its_items(server: Any, processor: Any) -> None:
    """The prompt is the same for items sent back and for previous_response_id."""
    server.text = f"{FIND}\n{WRITE}"
    tools = [NOTES, PATCH]
    first = create(server, tools=tools)
    actual, custom_call = first.output
    results: list[Any] = [
        {"type": "function_call_output", "call_id": actual.call_id, "output": "warm"},
        {"type": "custom_tool_call_output", "call_id": custom_call.call_id, "output": "done"},
    ]
    server.text = "hello"
    user = {"role": "user", "content": "the fox"}
    again = [item.model_dump(exclude_none=True) for item in first.output]
    create(server, tools=tools, input=[user, *again, *results])
    full = last_prompt(server, processor)
    second = create(server, tools=tools, input=results, previous_response_id=first.id)
    assert last_prompt(server, processor) == full
    assert "warm" in full and "done" in full
    listed = fetch(server, "GET", f"{PATH}/{second.id}/input_items?order=asc").json()["data"]
    kinds = [item["type"] for item in listed]
    assert kinds[1:] == [
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
    ]
    assert listed[2]["input"] == TEXT and listed[1]["namespace"] == "mcp__notes"


def test_client_tools_are_functions_in_the_prompt(server: Any, processor: Any) -> None:
    post(server, PATH, input="x", tools=[NOTES, {**PATCH, "format": LARK}])
    prompt = last_prompt(server, processor)
    assert '"mcp__notes__find"' in prompt and "Notes of the user" in prompt
    assert '"patch"' in prompt and LARK["definition"].replace('"', '\\"') in prompt


def custom_call(text: str) -> str:
    """Return a call of the custom tool with this input."""
    return WRITE.replace(TEXT, text)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (REGEX, ["a", "zebra"], ["", "A", "a1", "a\n"]),
        ({**REGEX, "definition": "a|b+"}, ["a", "bb"], ["ab", "aa"]),
        ({**REGEX, "definition": r"\d{2}"}, ["42"], ["4", "421"]),
        (LARK, ["x"], ["", "y", "xx"]),
        (
            {
                **LARK,
                "definition": """start: begin line+
begin: "*** Begin" LF
line: "+" /(.*)/ LF
%import common.LF""",
            },
            ["*** Begin\n+a{b}\n+\n"],
            ["*** Begin\n", "+a\n", "*** Begin\n-a\n"],
        ),
    ],
)
def test_custom_tool_grammar_constrains_input(
    server: Any, processor: Any, form: Any, right: list[str], wrong: list[str]
) -> None:
    """The model writes texts of calls without escapes."""
    response = post(server, PATH, input="x", tools=[{**PATCH, "format": form}])
    assert response.status_code == 200, response.text
    assert "x-lockstep-ignored-fields" not in response.headers
    source = server.client.requests[-1].params.structured_outputs.grammar
    for text in right:
        assert matches(processor.grammars, source, custom_call(text)), text
    for text in wrong:
        assert not matches(processor.grammars, source, custom_call(text)), text
    assert matches(processor.grammars, source, "an answer without a call")


def test_custom_tool_grammar_with_json_calls(server: Any, tmp_path: Path) -> None:
    """A regex constrains the text after decoding escapes. Lark is refused with a remedy."""
    folder = make_folder(tmp_path)
    settings = TextSettings(tool_call_parser="hermes")
    hermes = Processor.for_model(Tokenizer(folder), folder, 512, settings)
    server.app = create_app(Service(server.client, hermes, "tiny", "ls-test"))
    assert post(server, PATH, input="x", tools=[{**PATCH, "format": REGEX}]).status_code == 200
    assert server.client.requests[-1].grammar is not None
    response = post(server, PATH, input="x", tools=[{**PATCH, "format": LARK}])
    assert response.status_code == 400
    assert "the Lark grammar of 'patch' cannot be enforced" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "form",
    [
        {**LARK, "definition": "start: ("},
        {**LARK, "definition": 'start: "x" }\nr9: "y"'},
        {**LARK, "definition": "start: a[max_tokens=3]\na: /x+/"},
        {**LARK, "definition": "x" * 70_000},
        {**LARK, "definition": ""},
        {**REGEX, "definition": "a)|(?:b"},
        {**REGEX, "definition": "("},
    ],
)
def test_unenforceable_grammar_is_refused(server: Any, form: Any) -> None:
    response = post(server, PATH, input="x", tools=[{**PATCH, "format": form}])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools"), response.text


def test_error_names_the_clients_path(server: Any) -> None:
    """Although the tool's function has another path."""
    wrong = {"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}
    bad = {"type": "function", "name": "find", "parameters": wrong, "strict": True}
    for tools, path in (
        ([PATCH, bad], "tools[1].parameters: "),
        ([PATCH, {**NOTES, "tools": [PATCH, bad]}], "tools[1].tools[1].parameters: "),
    ):
        response = post(server, PATH, input="x", tools=tools)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(path), response.text


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "patch"},
        {"type": "function", "name": "find"},
        {"type": "function", "name": "find", "namespace": "mcp__notes"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "patch"}],
        },
    ],
)
def test_tool_choice_may_name_client_tools(server: Any, choice: Any) -> None:
    response = post(server, PATH, input="x", tools=[NOTES, PATCH], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert server.client.requests[-1].grammar is not None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([PATCH, PATCH], "two of the name 'patch'"),
        ([{**PATCH, "format": {"type": "yaml"}}], "format"),
        ([{"type": "file_search"}], "type='file_search' is not supported"),
        ([{**NOTES, "tools": [NOTES]}], "tools[0].tools[0]"),
        ([{**NOTES, "tools": NOTES["tools"] * 600}], "tools"),
    ],
)
def test_invalid_fields_are_refused(server: Any, tools: Any, message: str) -> None:
    response = post(server, PATH, input="x", tools=tools)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools"), response.text
    assert message in error["message"]


@pytest.mark.parametrize("text", ["", 'a"b\\c\n', "é😀\x00", "x" * 50])
def test_custom_input_is_independent_of_chunks(text: str) -> None:
    for ascii_only in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
        for cut in range(len(arguments)):
            reader = InputDecoder()
            parts = [reader.feed(arguments[:cut]), reader.feed(arguments[cut:])]
            assert "".join(parts) == text
        reader = InputDecoder()
        assert "".join(map(reader.feed, arguments)) == text


def test_lone_surrogate_is_replaced() -> None:
    assert InputDecoder().feed('{"input": "a\\ud83d!"}') == "a\ufffd!"
