"""Conversations of lockstep chat: with a model in this process, or with a running server."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import ConfigError, RequestError
from lockstep.outputs import RequestOutput
from lockstep.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lockstep.llm import LLM
    from lockstep.text.parsers.events import Reply

Message = dict[str, Any]
MAX_LINE_BYTES = 4 << 20
"""Maximum bytes of a line of a server's event stream."""
MAX_ANSWER_BYTES = 64 << 20
"""Maximum bytes of one streamed answer."""
TIMEOUT_SECONDS = 600.0
"""Maximum seconds without a byte from the server."""
CUT_NOTE = "the answer was cut: it reached max_tokens, or the model's context is full"
"""Note for an answer with finish reason "length"."""


@dataclass
class Answer:
    """Assistant message that grows while it is streamed, so that Ctrl-C keeps its beginning."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    def message(self) -> Message:
        """Return the message for the next request; an interrupted answer has no tool calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls and self.finish_reason is not None:
            message["tool_calls"] = self.tool_calls
        return message


class Conversation(Protocol):
    """Interface of a model or server that answers messages."""

    def answer(self, messages: list[Message], answer: Answer, show: Callable[[str], None]) -> None:
        """Stream the next message into `answer` and its text to `show`. Raises RequestError."""


class LocalModel:
    """Model that was loaded into this process."""

    def __init__(self, llm: "LLM", params: SamplingParams, tools: list[Message] | None) -> None:
        self._llm = llm
        self._params = params
        self._tools = tools

    def answer(self, messages: list[Message], answer: Answer, show: Callable[[str], None]) -> None:
        """Stream the next message, then parse reasoning and tool calls out of it."""

        def stream(output: RequestOutput) -> None:
            text = output.outputs[0].text
            show(text[len(answer.content) :])
            answer.content = text

        llm = self._llm
        output = llm.chat(
            messages, self._params, tools=self._tools, on_progress=stream, use_tqdm=False
        )[0]
        completion = output.outputs[0]
        metrics = output.metrics
        if completion.error:
            answer.notes.append(completion.error)
        answer.notes.append(
            f"{len(completion.token_ids)} tokens, acceptance length "
            f"{metrics.acceptance_length:.2f}, {metrics.num_cached_tokens} prompt tokens from the "
            "cache"
        )
        prompt = llm.processor.render_text(messages, self._tools)
        end = llm.processor.text_end(completion.finish_reason, completion.stop_reason, self._params)
        reply = llm.processor.reply_parser(prompt, self._tools).parse(completion.text, end)
        answer.content = reply.content or ""
        answer.tool_calls = _calls(reply)
        answer.finish_reason = completion.finish_reason  # set last: until then Ctrl-C drops calls


def _calls(reply: "Reply") -> list[dict[str, Any]]:
    """Return a reply's complete tool calls, as chat templates want them back in the next turn."""
    return [
        {
            "id": f"call-{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(reply.tool_calls)
        if call.complete
    ]


class Server:
    """Running server of Lockstep or another engine with OpenAI's chat completions."""

    def __init__(
        self,
        url: str,
        key: str | None,
        model: str | None,
        sampling: dict[str, Any],
        tools: list[Message] | None,
    ) -> None:
        from lockstep.serve.telemetry.metrics_reader import server_address

        self.url = f"{server_address(url)}/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        # Without proxies: the address is what the user typed.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._body = {"stream": True, "stream_options": {"include_usage": True}, **sampling}
        if tools:
            self._body["tools"] = tools
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        """Return the first model that the server names. Raises ConfigError."""
        try:
            with self._open("/models", None, 10.0) as answer:
                return str(json.loads(answer.read(MAX_LINE_BYTES))["data"][0]["id"])
        except RequestError as error:
            raise ConfigError(str(error)) from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"{self.url}/models names no model. Is it a server of OpenAI's API? Name the model "
                "as the argument, or another --url."
            ) from None

    def _open(self, path: str, body: Message | None, timeout: float) -> Any:
        """Return the open response of a request. Raises RequestError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            return self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                reason = _reason(error.read(MAX_LINE_BYTES))
            remedy = " Send its key with --api-key-file." if error.code == 401 else ""
            raise RequestError(f"{self.url} answered {error.code}: {reason}{remedy}") from None
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise RequestError(
                f"{self.url} cannot be reached: {why}. Is the server running there?"
            ) from None

    def answer(self, messages: list[Message], answer: Answer, show: Callable[[str], None]) -> None:
        """Stream the next message from the server; an exception closes the connection."""
        body = {**self._body, "model": self.model, "messages": messages}
        with self._open("/chat/completions", body, TIMEOUT_SECONDS) as response:
            for event in _events(response):
                if "error" in event:
                    raise RequestError(f"{self.url}: {_reason(json.dumps(event).encode())}")
                usage = event.get("usage")
                if isinstance(usage, dict):
                    answer.notes.append(f"{usage.get('completion_tokens')} tokens")
                for choice in event.get("choices") or ():
                    _add_choice(choice, answer, show)
        if answer.finish_reason is None:
            raise RequestError(f"{self.url} ended the answer early. Ask again.")


def _reason(data: bytes) -> str:
    """Return the message of an error's body, or the beginning of the body."""
    text = data.decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])[:2000]
    except (ValueError, LookupError, TypeError):
        return text[:200]


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of an event stream. Raises RequestError if it is malformed or too long."""
    total = 0
    try:
        while line := response.readline(MAX_LINE_BYTES):
            total += len(line)
            # A server could stream forever.
            if total > MAX_ANSWER_BYTES:
                raise RequestError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB.")
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if isinstance(event, dict):
                yield event
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the server's answer broke off: {error}. Ask again.") from None


def _add_choice(choice: dict[str, Any], answer: Answer, show: Callable[[str], None]) -> None:
    """Add a streamed choice to the answer: text, reasoning (shown only), parts of tool calls."""
    delta = choice.get("delta") or {}
    show(delta.get("reasoning_content") or delta.get("reasoning") or "")
    text = delta.get("content") or ""
    show(text)
    answer.content += text
    # A call comes in parts: its id and name in the first, its arguments over several.
    for part in delta.get("tool_calls") or ():
        function = part.get("function") or {}
        if part.get("index", 0) >= len(answer.tool_calls):
            call = {"name": function.get("name", ""), "arguments": ""}
            answer.tool_calls.append(
                {"id": part.get("id", ""), "type": "function", "function": call}
            )
        call = answer.tool_calls[part.get("index", 0)]["function"]
        arguments = function.get("arguments") or ""
        call["arguments"] += arguments
        show(arguments)
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
