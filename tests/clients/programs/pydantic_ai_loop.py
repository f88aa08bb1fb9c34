"""pydantic-ai: an agent with a tool, typed output and a stream, over three APIs."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

URL = sys.argv[1]
SETTINGS = ModelSettings(temperature=0, max_tokens=120)


class Person(BaseModel):
    name: str
    age: int


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
models = [
    OpenAIChatModel("lockstep", provider=openai),
    OpenAIResponsesModel("lockstep", provider=openai),
    AnthropicModel("lockstep", provider=AnthropicProvider(base_url=URL, api_key="none")),
]
for model in models:
    plain = Agent(model, model_settings=SETTINGS)
    complete = plain.run_sync("List the first 5 primes.")
    assert complete.output and complete.usage.output_tokens > 0, complete

    typed = Agent(model, output_type=Person, model_settings=SETTINGS)
    assert isinstance(typed.run_sync("Ann is 31 years old.").output, Person)

    cities: list[str] = []
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        cities.append(city)  # noqa: B023
        return f"sunny, 25 degrees in {city}"

    reply = agent.run_sync(
        "What is the weather in Rome?", usage_limits=UsageLimits(request_limit=4)
    )
    assert cities and reply.output, (cities, reply)
