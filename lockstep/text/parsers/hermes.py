"""Tool calls as Qwen3 and Hermes write them: <tool_call>{"name": ..., "arguments": {...}}."""

from lockstep.text.parsers.object_calls import ObjectCalls

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"


class HermesParser(ObjectCalls):
    """JSON objects in tags."""

    SIGNS = ("<function-name>",)
    OPENERS = {"call": _CALL}
    OVER = {"end": _CALL_END}
    ENDS_REASONING = (_CALL,)
    TAGS = (f"{_CALL}\n", f"\n{_CALL_END}")
    BETWEEN = "\n"
