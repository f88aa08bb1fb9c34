"""Factory of the engine in the engine's process."""

from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine.engine_process import MakeGrammar
from lockstep.llm import build_remote_engine
from lockstep.progress import Progress
from lockstep.serve.telemetry.logs import LogFormat, configure_logs
from lockstep.text.settings import TextSettings


def engine_factory(
    config: EngineConfig,
    text: TextSettings,
    log_format: LogFormat,
    progress: Progress,
) -> tuple[Engine, MakeGrammar]:
    """Build the engine of these settings; the process logs in the format of the server.

    Raises what build_remote_engine raises.
    """
    configure_logs(log_format)
    return build_remote_engine(config, text, progress)
