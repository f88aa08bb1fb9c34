"""Tokenizer, detokenizer and control tokens of a model folder."""
