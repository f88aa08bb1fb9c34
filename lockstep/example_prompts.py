"""Prompts of check and bench: seven short conversations and one long text."""

import random
from typing import Any

from lockstep.llm import LLM


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {k: {"type": "string", "description": v} for k, v in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


WEATHER = _tool("get_weather", "Weather of a city.", city="name of the city", unit="C or F")
BOOKING = _tool(
    "book_table", "Books a table.", restaurant="where", day="which day", guests="how many"
)
SEARCH = _tool("search_files", "Finds files by name.", pattern="what to look for", folder="where")

CONVERSATIONS: tuple[tuple[list[str], list[dict[str, Any]]], ...] = (
    (["What is the weather in Lisbon? Answer in degrees C."], [WEATHER, BOOKING]),
    (["Write a Python class for a stack with push, pop and peek, each with a docstring."], []),
    (
        [
            "My name is Robin, I live in Oslo and I have two cats, Miso and Tofu.",
            "Nice to meet you, Robin. How are Miso and Tofu?",
            "They are well. Say in which city I live and what my cats are called.",
        ],
        [],
    ),
    (["Book a table at Golden Fig on Friday for four guests."], [BOOKING, SEARCH]),
    (["Continue the sequence with twenty more numbers: 3, 6, 9, 12, 15, 18, 21, 24, 27, 30"], []),
    (
        [
            "Return a JSON object with the keys name, age, city and tags (a list of strings) for "
            "this person: Alice Brown is 34 years old, lives in Porto, and likes chess and sailing."
        ],
        [],
    ),
    (["Find all files named report in the folder archive."], [SEARCH, WEATHER, BOOKING]),
)

FILLER = (
    "The harbour was quiet that morning. Two boats came in with the tide, and the baker opened his "
    "shop at seven. Nobody spoke of the storm. The clock on the square was ten minutes late. "
)
NEEDLE = "The secret is silver platypus 22. "
QUESTION = "What is the secret?"


def short_prompts(llm: LLM) -> list[list[int]]:
    """Return the conversations as token ids; random ids if the model has no tokenizer."""
    if llm.tokenizer is None:
        return [_random_ids(llm, index, 80 + 17 * index) for index in range(len(CONVERSATIONS))]
    return [_conversation_ids(llm, turns, tools) for turns, tools in CONVERSATIONS]


def long_prompt(llm: LLM, length: int) -> list[int]:
    """Return about `length` tokens of filler with a needle in the middle and a question at the
    end."""
    if llm.tokenizer is None:
        return _random_ids(llm, 99, length)
    unit = len(llm.tokenizer.encode(FILLER))
    half = FILLER * max(1, length // (2 * unit))
    return _conversation_ids(llm, [half + NEEDLE + half + QUESTION], [])


def _conversation_ids(llm: LLM, turns: list[str], tools: list[dict[str, Any]]) -> list[int]:
    if llm.processor.template is None:
        return llm.processor.encode("\n".join(turns))
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return llm.processor.render(messages, tools=tools or None)


def _random_ids(llm: LLM, seed: int, length: int) -> list[int]:
    """Return a random pattern of 40 ids, repeated so that an n-gram drafter finds matches."""
    # A fixed seed: the prompts must be the same in every run that is compared.
    pattern = random.Random(seed).choices(range(llm.engine.vocab_size), k=40)
    return (pattern * (length // 40 + 1))[:length]
