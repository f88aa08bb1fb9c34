"""Messages from other hosts, unpickled so that they cannot run code.

Whoever reaches the port can send bytes. So only data of Lockstep's own classes is read, and of
functions only the few that ranks call.
"""

import pickle
import pickletools
from dataclasses import is_dataclass
from enum import Enum
from io import BytesIO
from typing import Any

from lockstep.errors import ConfigError

MODULES = frozenset(
    {
        "lockstep.cache.host_tier",
        "lockstep.config",
        "lockstep.sampling_params",
        "lockstep.scheduling.schedule",
        "lockstep.worker.rank_process",
        "lockstep.worker.startup",
    }
)
"""Modules whose dataclasses and enumerations are parts of messages."""
NAMES = frozenset(
    {
        ("builtins", "frozenset"),
        ("builtins", "set"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # its name in Python 3.13
        ("lockstep.worker.row_table_audit", "compare_ranks"),
        ("lockstep.worker.rank_times", "end_step_times"),
        ("lockstep.worker.rank_times", "start_step_times"),
        ("lockstep.worker.worker", "Worker.probe"),
    }
)
"""Other classes and functions that messages refer to."""


class _Unpickler(pickle.Unpickler):
    """Unpickler that finds nothing but the parts of messages."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function. Raises ConfigError for any other."""
        if (module, name) in NAMES:
            return super().find_class(module, name)
        # A dotted name would reach what a module imports.
        if module in MODULES and "." not in name:
            item = super().find_class(module, name)
            is_plain = isinstance(item, type) and (is_dataclass(item) or issubclass(item, Enum))
            if is_plain and item.__module__ == module:
                return item
        raise ConfigError(
            f"{module[:80]}.{name[:80]} is not allowed in a message between nodes; allowed: plain "
            "data, and the functions of lockstep.worker. Use nnodes=1 for functions of your own."
        )


def check_memo(data: bytes) -> None:
    """Raise ConfigError for a pickle that numbers its memo: a number takes memory of its size.

    Pickles of protocol 4 and later, such as all messages, do not. ValueError: it is no pickle.
    """
    for opcode, _, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            raise ConfigError(f"{opcode.name} is not allowed in a message; allowed: MEMOIZE.")


def decode_plain(data: bytes | memoryview) -> Any:
    """Unpickle a message of another host. Raises ConfigError for anything but plain data."""
    return _Unpickler(BytesIO(data)).load()
