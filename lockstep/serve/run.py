"""Running the server: uvicorn around the application, and the lines that show how to ask."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from lockstep.errors import ConfigError
from lockstep.serve.app import create_app
from lockstep.serve.service import Client, Service
from lockstep.text.processor import Processor


def serve(
    client: Client,
    processor: Processor,
    *,
    model_name: str,
    fingerprint: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "warning",
    show: Callable[[str], Any] = print,
) -> None:
    """Serves until interrupted. `client` is started; the caller shuts it down afterwards."""
    app = create_app(Service(client, processor, model_name, fingerprint))
    listener = _listen(host, port)
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    url = f"http://{_reachable(host)}:{listener.getsockname()[1]}"

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        if server.started:
            show(how_to_ask(url, model_name, processor.template is not None))
        await serving

    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"host={host!r} port={port} cannot be opened: {error.strerror}. "
            "Choose another port, for instance with --port."
        ) from error
    return listener


def _reachable(host: str) -> str:
    """The host as a client on this machine writes it."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def how_to_ask(url: str, model_name: str, chats: bool = True) -> str:
    """The URL, a curl line and a Python line, all of which work as pasted."""
    question = "What is the capital of France?"
    body: dict[str, Any] = {"model": model_name}
    if chats:
        address, answer = f"{url}/v1/chat/completions", "['message']['content']"
        body["messages"] = [{"role": "user", "content": question}]
    else:
        address, answer = f"{url}/v1/completions", "['text']"
        body["prompt"] = question
    script = (
        "import json, urllib.request as web; "
        f"ask = web.Request('{address}', json.dumps({body!r}).encode(), "
        "{'Content-Type': 'application/json'}); "
        f"print(json.load(web.urlopen(ask))['choices'][0]{answer})"
    )
    return "\n".join(
        [
            f"Lockstep serves {model_name} at {url}/v1 (base_url of OpenAI clients); {url}/docs",
            f"  curl -s {address} -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
            f'  python3 -c "{script}"',
        ]
    )
