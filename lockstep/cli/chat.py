"""lockstep chat: a conversation in the terminal, with tools if you bring them."""

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.conversation import CUT, Answer, Conversation, LocalModel, Message, Server
from lockstep.cli.options import changed_settings, engine_options, sampling_options, text_options
from lockstep.cli.show import load, note, print_text
from lockstep.errors import ConfigError, RequestError, brief
from lockstep.settings import read_named, why_unread
from lockstep.text.settings import TextSettings

ENDINGS = ("/exit", "/quit")
HELP = """\
/new    start over, with the system message if there is one
/help   show these lines
/exit   end the chat; so does Ctrl-D
Ctrl-C  end the answer, and keep what has come of it
Arrow keys edit the line and bring earlier ones back."""


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

    /help lists what may be typed besides messages. Ctrl-C ends an answer, /exit the chat. A tool
    call asks you for the tool's result.
    """
    known = _read_tools(tools)
    chosen = {"max_tokens": 1024, **sampling}
    if url is not None:
        _refuse_settings(settings, text)
        key = _key(api_key, api_key_file)
        server = Server(url, key, settings["model"], chosen, known)
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
    converse(LocalModel(llm, llm.processor.default_params(**chosen), known), system)


def _key(key: str | None, path: str | None) -> str | None:
    """Return the server's key, from its option or the first line of its file."""
    from lockstep.cli.serve import read_keys

    return read_keys(path)[0] if path is not None else key


def _refuse_settings(settings: dict[str, Any], text: dict[str, Any]) -> None:
    """Raise ConfigError for options of a model that a running server has loaded already."""
    usual = {one.name: one.default for one in fields(TextSettings)}
    changed = changed_settings(settings, ("model",))
    changed += [name for name, value in text.items() if value != usual[name]]
    if changed:
        flag = "--" + changed[0].replace("_", "-")
        raise ConfigError(
            f"{flag} is not allowed with --url: the server has its own. Allowed: MODEL, --system, "
            f"--tools and sampling parameters. Leave {flag} out."
        )


def converse(side: Conversation, system: str | None) -> None:
    """Read messages and show answers, until /exit or the end of input."""
    with suppress(ImportError):  # not everywhere; input() edits lines and keeps them with it
        import readline  # noqa: F401
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := _ask("> ")) is not None and line.strip() not in ENDINGS:
        if line.strip() == "/new":
            messages = list(start)
        elif line.strip() == "/help":
            note(HELP)
        elif line.strip().startswith("/") and " " not in line.strip():
            note(f"{brief(line.strip())} is not a command. /help lists them.", "red")
        elif line.strip():
            before = len(messages)
            messages.append({"role": "user", "content": line})
            try:
                take_turn(side, messages)
            except EOFError:
                return
            except RequestError as error:
                del messages[before:]
                note(str(error), "red")


def take_turn(side: Conversation, messages: list[Message]) -> None:
    """Answer until no tool is called any more; the user types the tools' results.

    Raises EOFError at the end of input.
    """
    while True:
        answer = Answer()
        try:
            side.answer(messages, answer, print_text)
        except KeyboardInterrupt:
            answer.notes = ["the answer was ended by Ctrl-C; what has come of it is kept"]
            answer.finish_reason = None
        print_text("\n")
        if answer.finish_reason == "length":
            answer.notes.append(CUT)
        for line in answer.notes:
            note(line)
        message = answer.message()
        messages.append(message)
        for call in message.get("tool_calls", []):
            result = _ask(f"result of {call['function']['name']}> ")
            if result is None:
                raise EOFError  # a model that calls tools again and again would never end
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if "tool_calls" not in message:
            return


def _ask(sign: str) -> str | None:
    """Return a line of the user's, "" after Ctrl-C, None at the end of input."""
    try:
        return input(sign)
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
