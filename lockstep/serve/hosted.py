"""The server's engine as its own process makes it."""

from collections.abc import Callable

from lockstep.config import EngineConfig
from lockstep.engine.build import pick_device
from lockstep.engine.engine import Engine
from lockstep.engine.host import MakeGrammar, give_way
from lockstep.llm import processor_of
from lockstep.serve.logs import LogFormat, write_logs
from lockstep.text.settings import TextSettings


def served_engine(
    config: EngineConfig,
    text: TextSettings,
    logs: LogFormat,
    progress: Callable[[str, int, int], None],
) -> tuple[Engine, MakeGrammar]:
    """The engine of these settings, and what makes grammars of recipes; for a process of its own,
    whose threads give way to the server's.

    What the first grammar would have to wait for is made here, so that no step shares the
    interpreter with that.
    """
    write_logs(logs)
    give_way(pick_device(config))
    engine = Engine(config, progress)
    processor = processor_of(engine.facts, text)
    if processor.grammars is not None:
        processor.grammars.prepare()
    return engine, processor.grammar_of
