"""lockstep chat with a scripted conversation and with a scripted server."""

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.cli.conversation import CUT_NOTE, Answer
from lockstep.errors import ConfigError, RequestError
from tests.http_server import QuietHandler, http_server

CHAT = import_module("lockstep.cli.chat")


class Scripted:
    """Conversation that runs one function per answer, and records the messages."""

    def __init__(self, *steps: Callable[[Answer, Callable[[str], None]], None]) -> None:
        self.steps = list(steps)
        self.sent: list[list[dict[str, Any]]] = []

    def answer(
        self, messages: list[dict[str, Any]], answer: Answer, show: Callable[[str], None]
    ) -> None:
        self.sent.append([dict(message) for message in messages])
        self.steps.pop(0)(answer, show)


def say(text: str, reason: str = "stop") -> Callable[[Answer, Callable[[str], None]], None]:
    def step(answer: Answer, show: Callable[[str], None]) -> None:
        show(text)
        answer.content = text
        answer.finish_reason = reason

    return step


def interrupt(answer: Answer, show: Callable[[str], None]) -> None:
    answer.content = "half of"
    answer.tool_calls = [{"id": "1", "function": {"name": "f", "arguments": "{"}}]
    raise KeyboardInterrupt


def refuse(answer: Answer, show: Callable[[str], None]) -> None:
    raise RequestError("too long")


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes input() return these lines, or raise these exceptions."""

    def lines(*entries: Any) -> None:
        remaining = list(entries)

        def read(prompt: str) -> str:
            if not remaining:
                raise EOFError
            line = remaining.pop(0)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    return lines


def test_ctrl_c_ends_only_the_answer(type_lines: Any, capsys: Any) -> None:
    """The generated text is kept without the incomplete tool call, and the chat continues."""
    conversation = Scripted(interrupt, say("again"))
    type_lines("one", KeyboardInterrupt(), "two")
    CHAT.converse(conversation, "be brief")
    assert [message["role"] for message in conversation.sent[1]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert conversation.sent[1][2] == {"role": "assistant", "content": "half of"}
    shown = capsys.readouterr()
    assert "ended by Ctrl-C" in shown.err and "/exit or Ctrl-D" in shown.err
    assert "again" in shown.out


def test_commands_of_the_chat(type_lines: Any, capsys: Any) -> None:
    conversation = Scripted(say("a"), say("b", "length"))
    type_lines("/help", "/nwe", "one", "/new", "two", "/exit", "three")
    CHAT.converse(conversation, None)
    assert [len(sent) for sent in conversation.sent] == [1, 1]
    stderr = capsys.readouterr().err
    assert (
        "/new    start over" in stderr
        and "'/nwe' is not a command" in stderr
        and CUT_NOTE in stderr
    )


def test_refused_message_is_removed(type_lines: Any, capsys: Any) -> None:
    conversation = Scripted(refuse, say("fine"))
    type_lines("one", "two")
    CHAT.converse(conversation, None)
    assert conversation.sent[1] == [{"role": "user", "content": "two"}]
    assert "too long" in capsys.readouterr().err


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """Serve chat completions from `events` or `status`; record `bodies` and `keys`."""
    server = SimpleNamespace(events=[], status=200, bodies=[], keys=[])

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.reply(200, b'{"data": [{"id": "served"}]}')

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            server.bodies.append(json.loads(self.rfile.read(size)))
            server.keys.append(self.headers["Authorization"])
            lines = [f"data: {json.dumps(event)}\n\n" for event in server.events]
            error = b'{"error": {"message": "no room"}}'
            self.reply(server.status, "".join(lines).encode() if server.status == 200 else error)

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with http_server(Handler) as server.url:
        yield server


def run(*words: str, input: str = "") -> Any:
    return CliRunner().invoke(app, ["chat", *words], input=input, catch_exceptions=False)


def delta(reason: str | None = None, **parts: Any) -> dict[str, Any]:
    return {"choices": [{"delta": parts, "finish_reason": reason}]}


def test_chat_with_a_server(server: SimpleNamespace) -> None:
    server.events = [
        delta(content="Hel"), delta(content="lo"), delta("stop"),
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]  # fmt: skip
    words = ("--url", f"{server.url}/v1", "--api-key", "k", "--temperature", "0", "--system", "s")
    shown = run(*words, input="hi\nmore\n")
    assert shown.exit_code == 0 and "Hello\n" in shown.stdout and "2 tokens" in shown.stderr
    first, second = server.bodies
    assert first["model"] == "served" and first["temperature"] == 0 and first["max_tokens"] == 1024
    assert second["messages"][1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "more"},
    ]
    assert server.keys == ["Bearer k"] * 2


def test_server_errors_and_incomplete_streams(server: SimpleNamespace) -> None:
    server.events = [delta(content="Hel")]
    shown = run("--url", server.url, "named", input="hi\n")
    assert "ended the answer early" in shown.stderr and server.bodies[0]["model"] == "named"
    server.status = 400
    assert "answered 400: no room" in run("--url", server.url, input="hi\n").stderr


def test_tool_calls_of_a_server(server: SimpleNamespace) -> None:
    """The parts of a call are joined, and its result is sent with the call's id."""
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    server.events = [delta(tool_calls=[call]), delta("tool_calls", tool_calls=[more])]
    run("--url", server.url, input="hi\n")
    shown = run("--url", server.url, input="hi\nblue\n")
    reply, result = server.bodies[2]["messages"][1:]
    assert reply["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert result == {"role": "tool", "tool_call_id": "c", "content": "blue"}
    assert "result of look> " in shown.stdout


def test_options_not_allowed_with_a_server() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs is not allowed with --url"):
        run("--url", "http://127.0.0.1:1", "--max-num-seqs", "4")
    with pytest.raises(ConfigError, match="api_key is not allowed without url"):
        run("--api-key", "k")
    with pytest.raises(ConfigError, match="cannot be reached"):
        run("--url", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="url=.ftp://a. is not allowed"):
        run("--url", "ftp://a")
