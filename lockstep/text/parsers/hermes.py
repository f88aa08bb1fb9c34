"""Tool calls of Qwen3 and Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from lockstep.text.parsers.object_calls import ObjectCalls

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"


class HermesParser(ObjectCalls):
    """Parser of JSON objects in tags."""

    SIGNS = ("<function-name>",)
    OPENERS = {"call": _CALL}
    CLOSERS = {"end": _CALL_END}
    ENDS_REASONING = (_CALL,)
    TAGS = (f"{_CALL}\n", f"\n{_CALL_END}")
    BETWEEN = "\n"
