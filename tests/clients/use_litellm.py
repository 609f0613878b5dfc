"""LiteLLM, under each of its two names for servers like this one."""

import asyncio
import sys

import litellm
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


def check(model: str) -> None:
    options = {"model": model, "api_base": sys.argv[1], "api_key": "none", "num_retries": 0}
    hello = [{"role": "user", "content": "Say hello."}]
    answer = litellm.completion(messages=hello, temperature=0, **options)
    assert answer.choices[0].message.content == "Hello there!" and answer.usage.completion_tokens

    usage = {"stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=hello, stream=True, **usage, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello there!"
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == answer.usage.completion_tokens

    weather = [{"role": "user", "content": "How is the weather?"}]
    called = litellm.completion(messages=weather, tools=[WEATHER], **options).choices[0].message
    assert called.tool_calls[0].function.arguments == '{"city": "Bern"}'
    told = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
    turns = [*weather, called.model_dump(), told]
    assert litellm.completion(messages=turns, tools=[WEATHER], **options).choices[0].message.content == "Hello there!"

    structured = litellm.completion(messages=hello, response_format=Person, **options)
    Person.model_validate_json(structured.choices[0].message.content)

    async_answer = asyncio.run(litellm.acompletion(messages=hello, **options))
    assert async_answer.choices[0].message.content == "Hello there!"
    try:
        litellm.completion(messages=[], **options)
    except litellm.BadRequestError as error:
        assert "messages" in str(error)
    else:
        raise AssertionError("no messages were answered")


check("openai/tiny")
check("hosted_vllm/tiny")
