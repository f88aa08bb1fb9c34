"""Values of Python literals, which some models write instead of JSON."""

import ast
import math
import sys
from typing import Any

_WORDS = {"true": True, "false": False, "null": None}


def literal_value(text: str) -> Any:
    """Return the value of a Python literal; JSON's true, false and null are allowed. Raises
    ValueError."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not a literal") from None


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=float() as value):
            return finite(value)
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -finite(value) if isinstance(value, float) else -value
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_value(entry) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(entry) for key, entry in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.AST | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is not a string")


def finite(value: float) -> float:
    """Return a number; infinities become the largest double of their sign."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value
