"""The server's engine as its own process makes it."""

from collections.abc import Callable

from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine.engine_process import MakeGrammar
from lockstep.llm import hosted_engine
from lockstep.serve.telemetry.logs import LogFormat, write_logs
from lockstep.text.settings import TextSettings


def served_engine(
    config: EngineConfig,
    text: TextSettings,
    logs: LogFormat,
    progress: Callable[[str, int, int], None],
) -> tuple[Engine, MakeGrammar]:
    """Return hosted_engine() of these settings, in a process that logs as the server does."""
    write_logs(logs)
    return hosted_engine(config, text, progress)
