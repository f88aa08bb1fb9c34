"""lockstep chat: a conversation in the terminal, with tools if you bring them."""

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.conversation import CUT_NOTE, Answer, Conversation, LocalModel, Message, Server
from lockstep.cli.options import changed_settings, engine_options, sampling_options, text_options
from lockstep.cli.show import load, note, print_text
from lockstep.errors import ConfigError, RequestError, brief
from lockstep.settings import path_fault, read_text_file
from lockstep.text.settings import TextSettings

EXIT_COMMANDS = ("/exit", "/quit")
HELP = """\
/new    start over, with the system message if there is one
/help   show these lines
/exit   end the chat; so does Ctrl-D
Ctrl-C  end the answer, and keep the part that was generated
Arrow keys edit the line and recall earlier ones."""
"""Text of the command /help."""


@engine_options
@text_options
@sampling_options
def chat(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with a list of tools, in OpenAI's form")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="chat with this running server; MODEL is a name that it serves"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the server, with --url")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="file whose first line is the API key")
    ] = None,
    *,
    settings: dict[str, Any],
    text: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Chat in the terminal, with a model or with a running server.

    /help lists the commands of the chat. Ctrl-C ends an answer, /exit the chat. If the model calls
    a tool, you are asked for its result.
    """
    tool_definitions = _read_tools(tools)
    params = {"max_tokens": 1024, **sampling}
    if url is not None:
        _refuse_settings(settings, text)
        key = _api_key(api_key, api_key_file)
        server = Server(url, key, settings["model"], params, tool_definitions)
        note(f"chatting with {server.model} at {server.url}; /help lists commands")
        converse(server, system)
        return
    if api_key is not None or api_key_file is not None:
        raise ConfigError(
            "api_key is not allowed without url; allowed: with --url, for a running server. Name "
            "the server with --url, or leave the key out."
        )
    llm = load(settings | text)
    note("/help lists commands")
    converse(LocalModel(llm, llm.processor.default_params(**params), tool_definitions), system)


def _api_key(key: str | None, path: str | None) -> str | None:
    """Return the server's key, from its option or the first line of its file."""
    from lockstep.cli.serve import read_keys

    return read_keys(path)[0] if path is not None else key


def _refuse_settings(settings: dict[str, Any], text: dict[str, Any]) -> None:
    """Raise ConfigError for options of a model that a running server has loaded already."""
    defaults = {field.name: field.default for field in fields(TextSettings)}
    changed = changed_settings(settings, ("model",))
    changed += [name for name, value in text.items() if value != defaults[name]]
    if changed:
        flag = "--" + changed[0].replace("_", "-")
        raise ConfigError(
            f"{flag} is not allowed with --url: the server decides it. Allowed: MODEL, --system, "
            f"--tools and sampling parameters. Leave {flag} out."
        )


def converse(conversation: Conversation, system: str | None) -> None:
    """Read messages and show answers, until /exit or the end of input."""
    # With readline, input() edits lines and recalls earlier ones; some builds of Python have none.
    with suppress(ImportError):
        import readline  # noqa: F401
    initial_messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(initial_messages)
    while (line := _read_line("> ")) is not None and line.strip() not in EXIT_COMMANDS:
        if line.strip() == "/new":
            messages = list(initial_messages)
        elif line.strip() == "/help":
            note(HELP)
        elif line.strip().startswith("/") and " " not in line.strip():
            note(f"{brief(line.strip())} is not a command. /help lists them.", "red")
        elif line.strip():
            num_messages = len(messages)
            messages.append({"role": "user", "content": line})
            try:
                take_turn(conversation, messages)
            except EOFError:
                return
            except RequestError as error:
                del messages[num_messages:]
                note(str(error), "red")


def take_turn(conversation: Conversation, messages: list[Message]) -> None:
    """Answer until the model calls no tool; the user types the tools' results.

    Raises EOFError at the end of input.
    """
    while True:
        answer = Answer()
        try:
            conversation.answer(messages, answer, print_text)
        except KeyboardInterrupt:
            answer.notes = ["the answer was ended by Ctrl-C; the generated part is kept"]
            # Without a finish reason, message() drops tool calls, which may be incomplete.
            answer.finish_reason = None
        print_text("\n")
        if answer.finish_reason == "length":
            answer.notes.append(CUT_NOTE)
        for line in answer.notes:
            note(line)
        message = answer.message()
        messages.append(message)
        for call in message.get("tool_calls", []):
            result = _read_line(f"result of {call['function']['name']}> ")
            if result is None:
                raise EOFError  # without a user, a model could call tools forever
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if "tool_calls" not in message:
            return


def _read_line(prompt: str) -> str | None:
    """Read a line from the user: "" after Ctrl-C, None at the end of input."""
    try:
        return input(prompt)
    except EOFError:
        print_text("\n")
        return None
    except KeyboardInterrupt:
        print_text("\n")
        note("/exit or Ctrl-D ends the chat")
        return ""


def _read_tools(path: Path | None) -> list[dict[str, Any]] | None:
    if path is None:
        return None
    try:
        tools = json.loads(read_text_file(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tools {brief(str(path))} cannot be read ({path_fault(error)}); name a JSON file."
        ) from None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and "function" in tool for tool in tools
    ):
        raise ConfigError(
            f'--tools {path} is no list of {{"type": "function", "function": ...}}; '
            "write the tools in OpenAI's form."
        )
    return tools
