"""Requests written by hand: how one is written down, and what is offered with it."""

from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
"""A tool's name and the arguments that it is called with."""
Case = tuple[list[dict[str, Any]], str, list[Call]]
"""The tools that are offered, the request, and the calls that are right."""

S = "string"
INT = "integer"
N = "number"
B = "boolean"

FOREIGN = 3
"""Every third request with calls also sees a tool of another domain."""


def tool(name: str, about: str = "", needs: str = "", /, **properties: Any) -> dict[str, Any]:
    """A schema; a property is a type, a list of an enum's members, or (type, description)."""
    entries: dict[str, Any] = {}
    for key, given in properties.items():
        if isinstance(given, list):
            entries[key] = {"type": "string", "enum": given}
        elif isinstance(given, tuple):
            entries[key] = {"type": given[0], "description": given[1]}
        elif given == "array":
            entries[key] = {"type": "array", "items": {"type": "string"}}
        else:
            entries[key] = {"type": given}
    parameters: dict[str, Any] = {"type": "object", "properties": entries}
    if needs:
        parameters["required"] = needs.split()
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v != ""}}


def call(name: str, /, **arguments: Any) -> Call:
    """A call that is right."""
    return name, arguments


@dataclass(frozen=True)
class Requests:
    """A set, by domain: tools, requests with their calls, and requests that none of them is for."""

    domains: dict[str, tuple[dict[str, Any], ...]]
    calls: dict[str, tuple[tuple[str, Call | list[Call]], ...]]
    no_call: dict[str, tuple[str, ...]]

    def cases(self) -> list[Case]:
        """All of them, domain by domain."""
        found: list[Case] = []
        names = list(self.domains)
        for at, domain in enumerate(names):
            for i, (request, calls) in enumerate(self.calls[domain]):
                tools = self._offered(domain, i)
                if i % FOREIGN == FOREIGN - 1:
                    tools.append(self.domains[names[(at + 5 + i) % len(names)]][0])
                found.append((tools, request, calls if isinstance(calls, list) else [calls]))
            for i, request in enumerate(self.no_call[domain]):
                found.append((self._offered(domain, i), request, []))
        return found

    def _offered(self, domain: str, index: int) -> list[dict[str, Any]]:
        """The domain's tools, their order turned by index."""
        tools = list(self.domains[domain])
        turn = index % len(tools)
        return tools[turn:] + tools[:turn]
