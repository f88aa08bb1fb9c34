"""Flags of `vllm serve`: one table defines their effect on the command line and in Python."""
