"""Ports for servers and groups of ranks that tests start."""

import socket


def free_port() -> int:
    """Return a TCP port of loopback on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
