"""Instructor, in each mode that does not need OpenAI itself."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0), mode=mode)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "response_model": Person}
    if mode is instructor.Mode.JSON:  # any object, and what the model makes of the schema in its prompt
        asked["extra_body"] = {"guided_json": Person.model_json_schema(), "response_format": None}
    assert isinstance(client.chat.completions.create(**asked, max_retries=0), Person), mode
    if mode is not instructor.Mode.JSON:
        partial = list(client.chat.completions.create_partial(**asked, max_retries=0))
        assert partial[-1].name is not None and partial[-1].age is not None, mode
