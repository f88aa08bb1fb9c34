"""lockstep serve: the OpenAI-compatible server."""

from typing import Annotated, Any

import typer

from lockstep.cli.options import engine_options
from lockstep.cli.show import load


@engine_options
def serve(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="the name that clients use; the folder's or id's if left out")
    ] = None,
    uvicorn_log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error")
    ] = "warning",
    *,
    settings: dict[str, Any],
) -> None:
    """Serve the OpenAI API until interrupted."""
    from lockstep.engine.client import EngineClient
    from lockstep.serve.run import serve as run

    llm = load(settings)
    client = EngineClient(llm.engine)
    client.start()
    try:
        run(
            client,
            llm.processor,
            model_name=served_model_name or settings["model"] or "lockstep",
            fingerprint=llm.engine.fingerprint,
            host=host,
            port=port,
            log_level=uvicorn_log_level,
        )
    finally:
        client.shutdown()
