"""OpenAI's Agents SDK: a tool loop and two turns of a session, by Responses and by chat."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = sys.argv[1]
set_tracing_disabled(True)
cities: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    cities.append(city)
    return f"sunny, 25 degrees in {city}"


async def run() -> None:
    """Run both kinds of model."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        cities.clear()
        agent = Agent(
            name="helper",
            instructions="You are a helpful assistant.",
            model=kind(model="lockstep", openai_client=client),
            model_settings=ModelSettings(temperature=0, max_tokens=120),
            tools=[get_weather],
        )
        session = SQLiteSession(kind.__name__)
        first = await Runner.run(agent, "What is the weather in Rome?", session=session)
        assert cities, first
        second = await Runner.run(agent, "And in Oslo?", session=session)
        assert second.final_output is not None
        stream = Runner.run_streamed(agent, "What is the weather in Paris?")
        events = [event async for event in stream.stream_events()]
        assert events and stream.final_output is not None


asyncio.run(run())
