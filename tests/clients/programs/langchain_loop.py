"""LangChain: invoke, stream, bound tools and structured output, over both APIs."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1]


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


class Person(BaseModel):
    name: str
    age: int


openai = ChatOpenAI(
    model="lockstep", base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=80
)
anthropic = ChatAnthropic(
    model="lockstep", base_url=URL, api_key="none", temperature=0, max_tokens=80
)
responses = ChatOpenAI(
    model="lockstep",
    base_url=f"{URL}/v1",
    api_key="none",
    temperature=0,
    max_tokens=80,
    use_responses_api=True,
)
for model in (openai, anthropic, responses):
    complete = model.invoke("List the first 5 primes.")
    assert complete.text and complete.usage_metadata["output_tokens"] > 0, complete
    streamed = "".join(chunk.text for chunk in model.stream("List the first 5 primes."))
    assert streamed == complete.text, (streamed, complete.text)

    bound = model.bind_tools([get_weather], tool_choice="any")
    history = [HumanMessage("What is the weather in Rome?")]
    reply = bound.invoke(history)
    (call,) = reply.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str), call
    history += [reply, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert model.bind_tools([get_weather]).invoke(history) is not None

for method in ("json_schema", "function_calling"):
    person = openai.with_structured_output(Person, method=method).invoke("Ann is 31 years old.")
    assert isinstance(person, Person), person
