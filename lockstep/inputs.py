"""Prompts as dicts, in vLLM's names."""

from typing import Required, TypedDict

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
MAX_SALT = 256
"""Characters of a cache_salt."""


class TextPrompt(TypedDict, total=False):
    """A prompt of text. cache_salt: only prompts of the same one share cached prefixes."""

    prompt: Required[str]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids; prompt: their text, where it is known, for the output alone."""

    prompt_token_ids: Required[list[int]]
    prompt: str
    cache_salt: str
