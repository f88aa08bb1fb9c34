"""An HTTP server of the fake engine on a local port."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.serve.fake_client import FakeClient
from tests.text.tiny_tokenizer import make_folder


@contextlib.contextmanager
def serving(folder: Path, text: str = "hello lazy fox") -> Iterator[tuple[str, FakeClient]]:
    """Yield (URL, fake engine); every output is `text`, three tokens per chunk."""
    processor = Processor.for_model(Tokenizer(make_folder(folder)), folder, 512)
    assert processor.tokenizer is not None
    script = [
        *processor.tokenizer.encode(text),
        processor.tokenizer.fast.token_to_id("<|im_end|>"),
    ]
    client = FakeClient(lambda request: script)
    app = create_app(Service(client, processor, "tiny", "ls-test"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", client
        finally:
            server.should_exit = True
            thread.join(timeout=20)
