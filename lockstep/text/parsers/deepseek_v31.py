"""Tool calls of DeepSeek-V3.1: NAME, a separator, and JSON, in tags."""

from lockstep.text.parsers.named_calls import NamedCalls

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
OPENERS = {"calls": CALLS, "call": CALL, "calls_end": CALLS_END}
CLOSERS = {"end": CALL_END}
AROUND = (CALLS, CALLS_END)
TAGS = (CALL, CALL_END)


class DeepSeekV31Parser(NamedCalls):
    """Parser of calls whose name precedes the separator."""

    SIGNS = (SEPARATOR,)
    OPENERS = OPENERS
    CLOSERS = CLOSERS
    ENDS_REASONING = (CALLS, CALL)
    SEPARATOR = SEPARATOR
    AROUND = AROUND
    TAGS = TAGS
    BETWEEN = ""
    TRAIL = SEPARATOR
