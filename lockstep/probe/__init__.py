"""Probe of any OpenAI-compatible server: correctness, determinism and speed, over HTTP only.

The package needs httpx, rich and typer. It imports neither torch nor the engine, so it also runs
where Lockstep itself is not used.
"""
