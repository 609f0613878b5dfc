"""The official client, with what it adds to the plain routes."""

import asyncio
import sys

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": "Say hello."}]
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)

answer = client.chat.completions.create(model="tiny", messages=ASKED)
assert answer.choices[0].message.content == "Hello there!" and answer.usage.completion_tokens

with client.chat.completions.stream(model="tiny", messages=ASKED) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.content == "Hello there!"

parsed = client.chat.completions.parse(model="tiny", messages=ASKED, response_format=Person)
assert isinstance(parsed.choices[0].message.parsed, Person)

weather = [{"role": "user", "content": "How is the weather?"}]
with client.chat.completions.stream(model="tiny", messages=weather, tools=[WEATHER]) as stream:
    [call] = stream.get_final_completion().choices[0].message.tool_calls
assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')
told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
turn = {"role": "assistant", "tool_calls": [call.model_dump()]}
answer = client.chat.completions.create(model="tiny", messages=[*weather, turn, told], tools=[WEATHER])
assert answer.choices[0].message.content == "Hello there!"

assert client.responses.create(model="tiny", input="Say hello.").output_text == "Hello there!"
with client.responses.stream(model="tiny", input="Say hello.") as events:
    assert events.get_final_response().output_text == "Hello there!"
assert isinstance(client.responses.parse(model="tiny", input="Who?", text_format=Person).output_parsed, Person)

assert [model.id for model in client.models.list()] == ["tiny"]
try:
    client.chat.completions.create(model="other", messages=ASKED)
except openai.NotFoundError as error:
    assert error.code == "model_not_found" and error.param == "model"
else:
    raise AssertionError("another model was served")


async def side_by_side() -> None:
    async with AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0) as several:
        answers = await asyncio.gather(
            *(several.chat.completions.create(model="tiny", messages=ASKED) for _ in range(8))
        )
    assert {answer.choices[0].message.content for answer in answers} == {"Hello there!"}


asyncio.run(side_by_side())
