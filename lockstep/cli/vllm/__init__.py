"""Flags of `vllm serve`: reader, --config file and documentation page."""
