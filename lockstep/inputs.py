"""Prompts as dicts, with vLLM's names."""

from typing import Required, TypedDict

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
MAX_SALT = 256
"""Maximum characters of a cache_salt."""


class TextPrompt(TypedDict, total=False):
    """Prompt as text. cache_salt: only prompts with the same salt share cached prefixes."""

    prompt: Required[str]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Prompt as token ids. prompt: its text, if known, which is only repeated in the output."""

    prompt_token_ids: Required[list[int]]
    prompt: str
    cache_salt: str
