"""instructor: validated objects by tools, by a JSON schema, and in a stream of partial objects."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

URL = sys.argv[1]


class Person(BaseModel):
    # An open object lets a small model add a key without an end.
    model_config = ConfigDict(extra="forbid")
    name: str
    age: int


request = {
    "model": "lockstep",
    "temperature": 0,
    "max_tokens": 80,
    "messages": [{"role": "user", "content": "Ann is 31 years old."}],
    "response_model": Person,
    "max_retries": 0,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    person = client.create(**request)
    assert isinstance(person, Person), person
    partials = list(client.create_partial(**request))
    assert partials[-1].model_dump() == person.model_dump(), (partials[-1], person)
