"""lockstep chat: a conversation in the terminal, with tools if you bring them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.options import engine_options, sampling_options, text_options
from lockstep.cli.show import load, note, print_text
from lockstep.errors import ConfigError, RequestError, brief
from lockstep.outputs import RequestOutput
from lockstep.sampling_params import SamplingParams
from lockstep.settings import read_named, why_unread
from lockstep.text.parsers.events import Reply

if TYPE_CHECKING:
    from lockstep.llm import LLM

ENDINGS = ("/exit", "/quit")


@engine_options
@text_options
@sampling_options
def chat(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with a list of tools, in OpenAI's form")
    ] = None,
    *,
    settings: dict[str, Any],
    text: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Chat in the terminal.

    /new starts over, /exit ends; a tool call asks you for the tool's result.
    """
    known = _read_tools(tools)
    llm = load(settings | text)
    params = llm.processor.default_params(**{"max_tokens": 1024, **sampling})
    start = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(start)
    while (line := _ask("> ")) is not None and line.strip() not in ENDINGS:
        if line.strip() == "/new":
            messages = list(start)
            continue
        if not line.strip():
            continue
        before = len(messages)
        messages.append({"role": "user", "content": line})
        try:
            _take_turn(llm, messages, known, params)
        except RequestError as error:
            del messages[before:]
            note(str(error), "red")


def _take_turn(
    llm: "LLM",
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    params: SamplingParams,
) -> None:
    """Answers until no tool is called any more; tool results are asked of the user."""
    while True:
        reply = _answer(llm, messages, tools, params)
        messages.append(reply)
        calls = reply.get("tool_calls", [])
        if not calls:
            return
        for call in calls:
            result = _ask(f"result of {call['function']['name']}> ")
            message = {"role": "tool", "tool_call_id": call["id"], "content": result or ""}
            messages.append(message)


def _answer(
    llm: "LLM",
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    params: SamplingParams,
) -> dict[str, Any]:
    shown = 0

    def stream(output: RequestOutput) -> None:
        nonlocal shown
        text = output.outputs[0].text
        print_text(text[shown:])
        shown = len(text)

    output = llm.chat(messages, params, tools=tools, on_progress=stream, use_tqdm=False)[0]
    print_text("\n")
    m = output.metrics
    error = output.outputs[0].error
    if error:
        note(error, "red")
    note(
        f"{len(output.outputs[0].token_ids)} tokens, acceptance length {m.acceptance_length:.2f}, "
        f"{m.num_cached_tokens} prompt tokens from the cache"
    )
    prompt = llm.processor.render_text(messages, tools)
    done = output.outputs[0]
    end = llm.processor.text_end(done.finish_reason, done.stop_reason, params)
    reply = llm.processor.reply_parser(prompt, tools).parse(done.text, end)
    return _message(reply)


def _message(reply: Reply) -> dict[str, Any]:
    """The assistant's message, as the template wants it back in the next turn."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    calls = [call for call in reply.tool_calls if call.complete]
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call-{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ]
    return message


def _ask(sign: str) -> str | None:
    """A line of the user's; None at the end of input."""
    try:
        return input(sign)
    except (EOFError, KeyboardInterrupt):
        print_text("\n")
        return None


def _read_tools(path: Path | None) -> list[dict[str, Any]] | None:
    if path is None:
        return None
    try:
        found = json.loads(read_named(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tools {brief(str(path))} cannot be read ({why_unread(error)}); name a JSON file."
        ) from None
    if not isinstance(found, list) or not all(
        isinstance(t, dict) and "function" in t for t in found
    ):
        raise ConfigError(
            f'--tools {path} holds no list of {{"type": "function", "function": ...}}; '
            "write the tools in OpenAI's form."
        )
    return found
