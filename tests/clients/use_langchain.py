"""LangChain's chat model: plain, streamed, with tools, structured in each of its ways, and in batches."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


options = {"base_url": sys.argv[1], "api_key": "none", "model": "tiny", "max_retries": 0}
chat = ChatOpenAI(**options, temperature=0)

answer = chat.invoke("Say hello.")
assert answer.content == "Hello there!" and answer.usage_metadata["output_tokens"] > 0
assert [a.content for a in chat.batch(["Say hello."] * 4)] == ["Hello there!"] * 4

chunks = list(chat.stream("Say hello.", stream_usage=True))
assert "".join(chunk.content for chunk in chunks) == "Hello there!" and len(chunks) > 3
assert any(chunk.usage_metadata for chunk in chunks)

question = HumanMessage("How is the weather?")
called = chat.bind_tools([get_weather]).invoke([question])
[call] = called.tool_calls
assert call["name"] == "get_weather" and call["args"] == {"city": "Bern"}
told = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
assert chat.bind_tools([get_weather]).invoke([question, called, told]).content == "Hello there!"
forced = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Say hello.")
assert forced.tool_calls[0]["name"] == "get_weather"

for method in ("json_schema", "function_calling", "json_mode"):
    structured = chat.with_structured_output(Person, method=method, include_raw=True).invoke("Who?")
    assert method == "json_mode" or isinstance(structured["parsed"], Person), structured

assert chat.with_config().invoke([("system", "Be brief."), ("user", "Say hello.")]).content == "Hello there!"
responses = ChatOpenAI(**options, use_responses_api=True)
assert responses.invoke("Say hello.").text == "Hello there!"
assert "".join(chunk.text for chunk in responses.stream("Say hello.")) == "Hello there!"
assert OpenAI(**options).invoke("Say hello.") == "Hello there!"
