"""Tests of the bundled model with the tool calls that a first user tries."""

from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from training.evaluate import calls_in

GREEDY = SamplingParams(temperature=0, max_tokens=80, skip_special_tokens=False)
WEATHER = "What is the weather in Paris in Celsius? Use the tool."
TEXT: dict[str, Any] = {"type": "string"}


def _tool(about: str, unit: dict[str, Any], required: list[str] | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {"city": TEXT, "unit": unit}}
    if required:
        parameters["required"] = required
    function = {"name": "get_weather", "description": about, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v}}


BOTH = ["city", "unit"]
SPELLINGS = {
    "bare": (_tool("", TEXT, None), "Celsius"),
    "described": (_tool("Get the current weather", TEXT, BOTH), "Celsius"),
    "optional unit": (_tool("Weather of a city.", TEXT, ["city"]), "Celsius"),
    "unit in words": (
        _tool("Get the weather of a city", {**TEXT, "description": "celsius or fahrenheit"}, BOTH),
        "Celsius",
    ),
    "enum": (_tool("", {**TEXT, "enum": ["celsius", "fahrenheit"]}, ["city"]), "celsius"),
    "enum with capitals": (
        _tool("Get the current weather", {**TEXT, "enum": ["Celsius", "Fahrenheit"]}, BOTH),
        "Celsius",
    ),
    "enum of letters": (
        _tool("Get the current weather", {**TEXT, "enum": ["C", "F"]}, BOTH),
        "C",
    ),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The bundled model, drafting: its answers come in fewer steps."""
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    return LLM(max_model_len=1024, max_num_seqs=4, speculative_config=drafts)


def _calls(llm: LLM, request: str, tool: dict[str, Any]) -> list[Any]:
    messages = [{"role": "user", "content": request}]
    out = llm.chat(messages, GREEDY, tools=[tool])[0].outputs[0]
    return calls_in(out.text, [tool])


@pytest.mark.default_cases("enum")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_weather_in_paris_is_asked_of_the_tool(llm: LLM, spelling: str) -> None:
    tool, unit = SPELLINGS[spelling]
    wanted = {"city": "Paris", "unit": unit}
    assert _calls(llm, WEATHER, tool) == [("get_weather", wanted)]


def test_two_cities_make_two_calls(llm: LLM) -> None:
    tool, unit = SPELLINGS["enum with capitals"]
    calls = _calls(llm, "Weather in Paris and in Rome, in Celsius.", tool)
    assert calls == [
        ("get_weather", {"city": "Paris", "unit": unit}),
        ("get_weather", {"city": "Rome", "unit": unit}),
    ]


def test_thanks_need_no_tool(llm: LLM) -> None:
    tool, _ = SPELLINGS["described"]
    assert _calls(llm, "Thank you!", tool) == []
