"""Tool calls of Nemotron Nano v2: <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>."""

from lockstep.text.parsers.object_calls import ObjectCalls

_CALL = "<TOOLCALL>"
_CALL_END = "</TOOLCALL>"


class NemotronParser(ObjectCalls):
    """Parser of a JSON list of objects in tags."""

    SIGNS = (_CALL,)
    OPENERS = {"call": _CALL}
    CLOSERS = {"end": _CALL_END}
    ENDS_REASONING = (_CALL,)
    AROUND = (f"{_CALL}[", f"]{_CALL_END}")
