"""The flags of `vllm serve`: one table says what each is on the command line and in Python."""
