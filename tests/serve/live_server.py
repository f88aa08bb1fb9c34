"""The bundled model as a server on its own socket, and clients of it."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import uvicorn

from lockstep import LLM, SamplingParams
from lockstep.engine.async_engine import AsyncEngine, Transport
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Limits, Service
from lockstep.text.processor import Processor
from tests.waiting import wait_until

PATIENCE = 60
SETTINGS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
GREEDY = SamplingParams(temperature=0, max_tokens=80)
CODE = "def read(path):"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "find_record",
            "description": "Find the record",
            "parameters": {
                "type": "object",
                "properties": {"owner": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["owner", "limit"],
            },
        },
    }
]
CALL: list[Any] = [
    {"role": "user", "content": "Find the record where owner is Zorin and limit is 12."}
]


@contextlib.contextmanager
def serving(llm: LLM) -> Iterator[SimpleNamespace]:
    """Yield the engine in a thread, the application in another, and clients of both APIs."""
    transport = ThreadTransport(llm.engine)
    with listening(transport, llm.processor, llm.engine.fingerprint) as result:
        result.service.drafts_predictions = llm.engine.plan.has_predictions
        result.llm = llm
        yield result


@contextlib.contextmanager
def listening(
    transport: Transport, processor: Processor, fingerprint: str, limits: Limits | None = None
) -> Iterator[SimpleNamespace]:
    """Yield the application over an engine, in a thread, and clients of both APIs."""
    engine = AsyncEngine(transport)
    engine.start()
    service = Service(engine, processor, "lockstep", fingerprint, limits)
    app = create_app(service)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve(listener: socket.socket) -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(serve(listener)))
        thread.start()
        try:
            wait_until(lambda: server.started)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http:
                ask = openai.OpenAI(
                    base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0
                )
                yield SimpleNamespace(
                    http=http, ask=ask, engine=engine, service=service, url=url, loop=loops[0]
                )
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            engine.shutdown()
    assert not thread.is_alive()


def chat(server: SimpleNamespace, messages: list[Any], **options: Any) -> Any:
    """Return a chat completion, or the list of its chunks."""
    options = {"temperature": 0, "max_tokens": 80, **options}
    response = server.ask.chat.completions.create(model="lockstep", messages=messages, **options)
    return list(response) if options.get("stream") else response


def complete(server: SimpleNamespace, prompt: Any = CODE, **options: Any) -> Any:
    """Return a completion, or the list of its chunks."""
    options = {"temperature": 0, "max_tokens": 16, **options}
    response = server.ask.completions.create(model="lockstep", prompt=prompt, **options)
    return list(response) if options.get("stream") else response
