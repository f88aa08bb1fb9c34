"""Format of handwritten requests, and the tools that they are offered with."""

from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name of a tool and the arguments of the call."""
Case = tuple[list[dict[str, Any]], str, list[Call]]
"""(offered tools, request, correct calls)."""

S = "string"
INT = "integer"
N = "number"
B = "boolean"

FOREIGN = 3
"""Every third request with calls is also offered a tool of another domain."""


def tool(name: str, about: str = "", needs: str = "", /, **properties: Any) -> dict[str, Any]:
    """Return a tool's schema.

    A property is a type, a list of an enum's members, or (type, description). needs: required
    properties.
    """
    entries: dict[str, Any] = {}
    for key, spec in properties.items():
        if isinstance(spec, list):
            entries[key] = {"type": "string", "enum": spec}
        elif isinstance(spec, tuple):
            entries[key] = {"type": spec[0], "description": spec[1]}
        elif spec == "array":
            entries[key] = {"type": "array", "items": {"type": "string"}}
        else:
            entries[key] = {"type": spec}
    parameters: dict[str, Any] = {"type": "object", "properties": entries}
    if needs:
        parameters["required"] = needs.split()
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v != ""}}


def call(name: str, /, **arguments: Any) -> Call:
    """Return a correct call."""
    return name, arguments


@dataclass(frozen=True)
class Requests:
    """Requests by domain: tools, requests with their calls, and requests that no tool fits."""

    domains: dict[str, tuple[dict[str, Any], ...]]
    calls: dict[str, tuple[tuple[str, Call | list[Call]], ...]]
    no_call: dict[str, tuple[str, ...]]

    def cases(self) -> list[Case]:
        """Return all cases, domain by domain."""
        all_cases: list[Case] = []
        names = list(self.domains)
        for position, domain in enumerate(names):
            for i, (request, calls) in enumerate(self.calls[domain]):
                tools = self._offered(domain, i)
                if i % FOREIGN == FOREIGN - 1:
                    tools.append(self.domains[names[(position + 5 + i) % len(names)]][0])
                all_cases.append((tools, request, calls if isinstance(calls, list) else [calls]))
            for i, request in enumerate(self.no_call[domain]):
                all_cases.append((self._offered(domain, i), request, []))
        return all_cases

    def _offered(self, domain: str, index: int) -> list[dict[str, Any]]:
        """Return the domain's tools, rotated by index."""
        tools = list(self.domains[domain])
        shift = index % len(tools)
        return tools[shift:] + tools[:shift]
