"""Stub of an OpenAI-compatible server that can misbehave in one named way.

Without a misbehaviour it answers like a deterministic model: the tokens of an answer are words that
a hash of the prompt chooses. So every finding of the probe has one known cause.
"""

import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import QuietHandler, http_server

WORDS = (
    "amber birch cedar delta ember fjord grove heron inlet jade knoll larch maple north ochre "
    "pearl quartz reed slate thorn umber vale willow xenon yarrow zinc brook cliff dune field"
).split()
WINDOW = 1000
"""Tokens of a prompt that a server with a cut context reads."""
TOOL_ANSWERS = {
    "add an event": (
        "add_event",
        {
            "title": "talk",
            "place": {"city": "Rome", "street": "Main Street"},
            "guests": [{"name": "Ana", "email": "ana@example.org"}],
        },
    ),
    "search": ("search", {"query": "maps", "limit": 3}),
    "weather": ("get_weather", {"city": "Lima", "unit": "celsius"}),
}


class State:
    """Misbehaviour of a stub, and what it remembers between requests."""

    def __init__(self, wrong: str, key: str | None = None) -> None:
        self.wrong = wrong
        self.key = key
        self.lock = threading.Lock()
        self.running = 0
        self.batched = threading.Event()
        """Set once more than four requests have run at the same time."""
        self.aborted = 0
        self.prefixes: set[str] = set()
        self.requests = 0


def value_of(schema: dict[str, Any]) -> Any:
    """Return a value that matches a schema of the probe."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: value_of(part) for name, part in schema["properties"].items()}
    if schema["type"] == "array":
        return [value_of(schema["items"])]
    return {"string": "blue", "integer": 7, "boolean": True, "number": 1.5}[schema["type"]]


def words_of(key: str, count: int) -> list[str]:
    """Return tokens that depend on a key: words with a space after each but the last."""
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    names = [rng.choice(WORDS) for _ in range(min(count, 400))]
    return [f"{name} " for name in names[:-1]] + names[-1:]


class Model:
    """Answers of the stub to one request body."""

    def __init__(self, state: State, body: dict[str, Any]) -> None:
        self.state = state
        self.body = body
        self.prompt = "\n".join(str(m.get("content")) for m in body["messages"])
        self.calls: list[dict[str, Any]] = []
        self.finish = "stop"
        self.tokens = self._tokens()

    def _key(self) -> str:
        """Return what an answer depends on; a misbehaving server adds what it must not."""
        body, state, wrong = self.body, self.state, self.state.wrong
        key = self.prompt
        if body.get("temperature"):
            key += "sampled" if wrong == "seed without effect" else f"seed {body.get('seed')}"
            if wrong == "seed that does not repeat":
                key += str(state.requests)
        prefix = self.prompt[:200]
        if wrong == "batch" and state.batched.is_set():
            key += "batch"
        if wrong == "prefix" and prefix in state.prefixes and len(self.prompt) > 200:
            key += "hit"
        if wrong == "drift" and "harbour" in key:
            key += str(state.requests // 5)
        if wrong == "abort" and state.aborted:
            key += "abort"
        if wrong == "stream" and body.get("stream"):
            key += "stream"
        if len(self.prompt) > 200:
            state.prefixes.add(prefix)
        return key

    def _tokens(self) -> list[str]:
        lower = self.prompt.lower()
        if "tools" in self.body:
            return self._tool_tokens(lower)
        if "response_format" in self.body:
            return self._json_tokens()
        code = re.search(r"code of the vault is (\d+)", self.prompt)
        if code:
            lost = self.state.wrong == "lost needle" and len(self.prompt) > 4 * WINDOW
            return self._limited(["unknown"] if lost else [code[1]])
        if self.state.wrong == "loop" and "essay" in lower:
            return self._limited(["the ", "end "] * 100)
        if self.state.wrong == "cascade" and "story" in lower:
            fading = [f"{random.Random(i).choice(WORDS[:4])} " for i in range(200)]
            return self._limited([*(f"word{i} " for i in range(60)), *fading])
        return self._stopped(words_of(self._key(), 400))

    def _limited(self, tokens: list[str]) -> list[str]:
        limit = self.body["max_tokens"]
        self.finish = "stop" if len(tokens) <= limit else "length"
        return tokens[:limit]

    def _stopped(self, tokens: list[str]) -> list[str]:
        tokens = self._limited(tokens)
        for stop in self.body.get("stop") or ():
            text = "".join(tokens)
            if stop in text:
                cut = text.index(stop)
                text = text[: cut + len(stop) * (self.state.wrong == "stop string")]
                tokens, self.finish = re.findall(r"\S+\s*|\s+", text), "stop"
        return tokens

    def _tool_tokens(self, lower: str) -> list[str]:
        name, arguments = next(v for part, v in TOOL_ANSWERS.items() if part in lower)
        text = json.dumps(arguments)
        if self.state.wrong == "tool arguments":
            text = text[:-1]
        if self.state.wrong == "tool markup":
            return [f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call>']
        count = 2 if "each city" in lower else 1
        self.calls = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": text}}
            for i in range(count)
        ]
        self.finish = "tool_calls"
        return []

    def _json_tokens(self) -> list[str]:
        if self.state.wrong == "schema":
            return ['{"colour": ', '"red"}']
        wanted = self.body["response_format"]
        schema = wanted["json_schema"]["schema"] if "json_schema" in wanted else None
        return [json.dumps(value_of(schema) if schema else {"colour": "red"})]

    def logprobs(self, token: str) -> dict[str, Any]:
        """Return the entry of logprobs for one token."""
        wrong = self.state.wrong
        values = [-0.05, -4.0, -5.0]
        if wrong == "large numbers":
            values = [10**400, -4.0, -5.0]
        if wrong == "sum":
            values = [-0.05, -0.4, -0.5]
        if wrong == "unsorted":
            values = [-0.05, -5.0, -4.0]
        chosen = -4.0 if wrong == "not the top" else values[0]
        names = ["other", token, "third"] if wrong == "not the top" else [token, "other", "third"]
        top = [{"token": n, "logprob": v} for n, v in zip(names, values, strict=True)]
        return {"token": token, "logprob": chosen, "top_logprobs": top[: self.body["top_logprobs"]]}

    def usage(self) -> dict[str, int]:
        """Return the token counts: four characters of a prompt are a token."""
        prompt = len(self.prompt) // 4
        if self.state.wrong == "large numbers":
            prompt = 10**400
        if self.state.wrong == "cut prompt":
            prompt = min(prompt, WINDOW)
        count = max(len(self.tokens), 1)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }

    def completion(self) -> dict[str, Any]:
        """Return the body of a plain reply."""
        content = "\ud800 " * (self.state.wrong == "surrogate") + "".join(self.tokens)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.calls:
            message = {"role": "assistant", "content": None, "tool_calls": self.calls}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        if self.body.get("logprobs"):
            choice["logprobs"] = {"content": [self.logprobs(t) for t in self.tokens]}
        return {"object": "chat.completion", "choices": [choice], "usage": self.usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream."""
        for token in self.tokens:
            choice = {"index": 0, "delta": {"content": token}, "finish_reason": None}
            if self.body.get("logprobs"):
                choice["logprobs"] = {"content": [self.logprobs(token)]}
            yield {"choices": [choice]}
        if self.calls:
            calls = [call | {"index": i} for i, call in enumerate(self.calls)]
            yield {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]}
        yield {"choices": [], "usage": self.usage()}


@contextmanager
def wrong_server(wrong: str, key: str | None = None) -> Iterator[tuple[str, State]]:
    """Serve a stub with this misbehaviour ("" for none); yield its URL and state."""
    state = State(wrong, key)

    class Handler(QuietHandler):
        """Handler of one connection."""

        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            """List the model."""
            if self.path == "/v1/models":
                length = 10**400 if wrong == "large context" else 4096
                answer(self, 200, {"data": [{"id": "stub", "max_model_len": length}]})
            elif self.path == "/metrics" and wrong != "no metrics":
                counts = (3 * state.requests, 4 * state.requests)
                names = ("accepted_tokens_total", "draft_tokens_total")
                lines = [
                    f'vllm:spec_decode_num_{name}{{model_name="stub"}} {count}.0'
                    for name, count in zip(names, counts, strict=True)
                ]
                send_text(self, "\n".join(lines), "text/plain")
            else:
                answer(self, 404, {"error": {"message": "not here"}})

        def do_POST(self) -> None:
            """Answer a chat completion."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.requests += 1
                state.running += 1
                if state.running > 4:
                    state.batched.set()
            try:
                respond(self, state, body)
            except OSError:
                state.aborted += 1
                self.close_connection = True
            finally:
                with state.lock:
                    state.running -= 1

    with http_server(Handler) as url:
        yield url, state


def answer(handler: BaseHTTPRequestHandler, status: int, value: Any, **headers: str) -> None:
    """Send a JSON value, or a text as HTML."""
    data = value if isinstance(value, str) else json.dumps(value)
    kind = "text/html" if isinstance(value, str) else "application/json"
    send_text(handler, data, kind, status, **headers)


def send_text(
    handler: BaseHTTPRequestHandler, text: str, kind: str, status: int = 200, **headers: str
) -> None:
    """Send a text of a content type."""
    data = text.encode()
    handler.send_response(status)
    for name, text in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
        handler.send_header(name.replace("_", "-"), text)
    handler.end_headers()
    handler.wfile.write(data)


def refusal_of(body: dict[str, Any]) -> str | None:
    """Return why a request is wrong, or None."""
    if not isinstance(body.get("temperature"), int | float):
        return "temperature must be a number"
    if body["max_tokens"] < 1:
        return "max_tokens must be at least 1"
    if any("role" not in message for message in body["messages"]):
        return "role is missing"
    return None


def respond(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> None:
    """Send a plain reply or a stream, or misbehave in the transport."""
    if state.key is not None and handler.headers["Authorization"] != f"Bearer {state.key}":
        return answer(handler, 401, {"error": {"message": f"not {state.key}"}})
    why = refusal_of(body)
    if why is not None:
        return answer(handler, 400, {"error": {"message": why}})
    if state.wrong == "no tools" and "tools" in body:
        return answer(handler, 400, {"error": {"message": "tools need --tool-parser"}})
    if state.wrong == "no schemas" and "json_schema" in body.get("response_format", {}):
        return answer(handler, 500, {"error": {"message": "unknown type json_schema"}})
    if TRANSPORT.get(state.wrong, lambda *_: False)(handler, state, body):
        return None
    if state.wrong == "batch" and "describe the number" in str(body["messages"]):
        # One of the 32 others. On a busy machine it would end before the next one begins.
        state.batched.wait(timeout=30)
    model = Model(state, body)
    if not body.get("stream"):
        return answer(handler, 200, model.completion())
    begin_stream(handler)
    for chunk in model.chunks():
        send_event(handler, json.dumps(chunk))
        if "long story" in model.prompt or "rain forms" in model.prompt:
            time.sleep(0.002)  # so that an abort is noticed
    if state.wrong != "unfinished":
        send_event(handler, "[DONE]")
    return None


def begin_stream(handler: BaseHTTPRequestHandler) -> None:
    """Send the head of a stream, which ends with its connection."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True


def send_event(handler: BaseHTTPRequestHandler, data: str) -> None:
    """Send one event."""
    handler.wfile.write(f"data: {data}\n\n".encode())


def _html(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    answer(handler, 200, "<html><b>Welcome</b></html>")
    return True


def _broken_stream(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    if body.get("stream"):
        begin_stream(handler)
        send_event(handler, '{"choices": [{"index": 0, "delta"')
    return bool(body.get("stream"))


def _endless(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    if body.get("stream"):
        begin_stream(handler)
        while True:
            send_event(handler, '{"choices": [{"index": 0, "delta": {"content": "a"}}]}')
    return False


def _drip(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    if body.get("stream"):
        begin_stream(handler)
        while True:
            handler.wfile.write(b":\n\n")
            time.sleep(0.05)
    return False


def _huge(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    answer(handler, 200, {"padding": "a" * (17 << 20)})
    return True


def _error_500(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    if state.requests % 5 == 0:
        answer(handler, 500, "<html>Internal Server Error</html>")
        return True
    return False


def _busy(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    if state.requests % 2:
        answer(handler, 429, {"error": {"message": "slow down"}}, Retry_After="0.01")
        return True
    return False


def _silent(handler: BaseHTTPRequestHandler, state: State, body: dict[str, Any]) -> bool:
    """Answer long requests only after the test."""
    while body["max_tokens"] > 100 and state.wrong == "silent":
        time.sleep(0.02)
    return False


TRANSPORT = {
    "silent": _silent,
    "html": _html,
    "broken stream": _broken_stream,
    "endless": _endless,
    "drip": _drip,
    "huge": _huge,
    "500": _error_500,
    "busy": _busy,
}
