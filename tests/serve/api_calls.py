"""Calls of the server's API: through the official clients, or with a raw body."""

import asyncio
from importlib import import_module
from typing import Any

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
USER = [{"role": "user", "content": "the fox"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
CALL = (
    '<tool_call>\n<function=get>\n<parameter=city>\nRio "x"\n</parameter>\n'
    "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
)
BODIES: dict[str, dict[str, Any]] = {CHAT_PATH: {"messages": USER}, TEXT_PATH: {"prompt": "the"}}
"""Minimal body of each path."""


def anthropic() -> Any:
    """Import Anthropic's official library, which is slow and so not imported at collection."""
    return import_module("anthropic")


def create_chat(server, **options):
    """Return a chat completion, or its chunks."""

    async def run():
        async with server.openai() as client:
            options.setdefault("messages", USER)
            answer = await client.chat.completions.create(model="tiny", **options)
            return [chunk async for chunk in answer] if options.get("stream") else answer

    return asyncio.run(run())


def create_completion(server, **options):
    """Return a completion, or its chunks."""

    async def run():
        async with server.openai() as client:
            answer = await client.completions.create(model="tiny", **options)
            return [chunk async for chunk in answer] if options.get("stream") else answer

    return asyncio.run(run())


def fetch(server, method, path, **options):
    """Return the raw response to a request."""

    async def run():
        async with server.http() as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def post(server, path, **body):
    """Return the response to a path's minimal body with these fields added."""
    return fetch(server, "POST", path, json={**BODIES.get(path, {}), **body})
