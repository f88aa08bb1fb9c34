"""Tool calls as Nemotron Nano v2 writes them: <TOOLCALL>[{"name": ..., "arguments": {...}}]."""

from lockstep.text.parsers.object_calls import ObjectCalls

_CALL = "<TOOLCALL>"
_CALL_END = "</TOOLCALL>"


class NemotronParser(ObjectCalls):
    """A JSON list of objects in tags."""

    SIGNS = (_CALL,)
    OPENERS = {"call": _CALL}
    OVER = {"end": _CALL_END}
    ENDS_REASONING = (_CALL,)
    AROUND = (f"{_CALL}[", f"]{_CALL_END}")
