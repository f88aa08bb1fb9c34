"""LlamaIndex: complete, chat, stream, a tool call and a pydantic program."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = sys.argv[1]
llm = OpenAILike(
    model="lockstep",
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=80,
    context_window=4096,
)


class Person(BaseModel):
    """A person with a name and an age."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


question = [ChatMessage(role="user", content="List the first 5 primes.")]
complete = llm.chat(question).message.content
assert complete, "an empty answer"
assert "".join(part.delta or "" for part in llm.stream_chat(question)) == complete
assert llm.complete("List the first 5 primes.").text

reply = llm.chat_with_tools(
    [FunctionTool.from_defaults(get_weather)], "What is the weather in Rome?", tool_required=True
)
(call,) = llm.get_tool_calls_from_response(reply)
assert call.tool_name == "get_weather" and isinstance(call.tool_kwargs["city"], str), call

person = llm.as_structured_llm(Person).complete("Ann is 31 years old.").raw
assert isinstance(person, Person), person
