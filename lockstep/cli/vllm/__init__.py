"""The flags of `vllm serve`, read by their names: one table says what each is here."""
