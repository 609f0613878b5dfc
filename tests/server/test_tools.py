"""Tool calls through the chat route, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from jaxserve.engine.messages import Add
from jaxserve.server.schemas import FunctionDefinition
from jaxserve.server.tools import calls_schema
from jaxserve.tokenizer import Tokenizer
from tests.server.calls import CHAT, USER, Body, error_of, ok, post, stream
from tests.server.conftest import MODEL, Served, encode_answer, serve
from tests.server.obedient import obedient

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}]{% endfor %}"
)
TOOLS: list[Body] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = [
    {"city": 'A "quoted" {brace}', "days": 3.5, "deep": {"list": [1, [], {"x": None}], "ok": True}},
    {"city": "Zürich\n🫠 북", "note": "back\\slash </tool_call> ' ] ; }"},
    {},
]


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for name, arguments in calls
    )


@pytest.fixture(scope="session")
def calling(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Servers by tool parser, with a template that shows tools."""
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    tokenizer = Tokenizer.load(checkpoints["tiny-llama-3.1"], template)
    with serve(tokenizer, 518, context=1024, enable_auto_tool_choice=True, tool_call_parser="hermes") as served:
        yield served


@pytest.fixture
def tooled(calling: Served) -> Served:
    calling.engine.received.clear()
    return calling


def message_of_stream(chunks: list[Body], index: int = 0) -> tuple[Body, str]:
    """What a client puts together from the deltas of one choice."""
    message: Body = {"content": None}
    calls: list[Body] = []
    reason = None
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        delta = choice["delta"]
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function" and call["function"]["name"]
                calls.append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                assert call["function"]["arguments"]
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {**message, "calls": calls}, reason or ""


def call_both_ways(served: Served, **fields: Any) -> tuple[Body, str]:
    """The message and its finish_reason, streamed and not, which must agree."""
    choice = ok(post(served, CHAT, **fields))["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    answer = {"content": choice["message"]["content"], "calls": calls}, choice["finish_reason"]
    assert message_of_stream(stream(served, CHAT, **fields)) == answer
    return answer


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["nested", "unicode", "empty"])
def test_tc01_arguments_arrive_whole(tooled: Served, arguments: Any) -> None:
    tooled.says("Let me see.\n" + hermes(("get_weather", arguments)))
    message, reason = call_both_ways(tooled, tools=TOOLS)
    assert (message["content"], reason) == ("Let me see.", "tool_calls")
    [call] = message["calls"]
    assert call["name"] == "get_weather" and json.loads(call["arguments"]) == arguments


def test_arguments_are_streamed_as_they_come(tooled: Served) -> None:
    tooled.says(hermes(("get_weather", {"city": "Llanfairpwllgwyngyll"})))
    chunks = stream(tooled, CHAT, tools=TOOLS)
    assert sum("tool_calls" in c["delta"] for chunk in chunks for c in chunk["choices"]) > 5


def test_calls_alone_leave_no_content(tooled: Served) -> None:
    tooled.says(hermes(("now", {}), ("get_weather", {"city": "Bern"})))
    answer = ok(post(tooled, CHAT, tools=TOOLS, n=2))
    for choice in answer["choices"]:
        assert choice["message"]["content"] is None
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now", "get_weather"]
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


def test_an_answer_without_calls(tooled: Served) -> None:
    tooled.says("It is < 5 degrees. \n")
    assert call_both_ways(tooled, tools=TOOLS) == ({"content": "It is < 5 degrees. \n", "calls": []}, "stop")


def test_tc04_one_call_at_most_where_they_may_not_be_parallel(tooled: Served) -> None:
    tooled.says(hermes(("now", {}), ("get_weather", {"city": "Bern"})))
    message, reason = call_both_ways(tooled, tools=TOOLS, parallel_tool_calls=False)
    assert message["calls"] == [{"name": "now", "arguments": "{}"}] and reason == "tool_calls"
    assert len(call_both_ways(tooled, tools=TOOLS, parallel_tool_calls=True)[0]["calls"]) == 2


def test_tc08_no_calls_where_none_may_be(tooled: Served) -> None:
    text = hermes(("now", {}))
    tooled.says(text)
    assert call_both_ways(tooled, tools=TOOLS, tool_choice="none") == ({"content": text, "calls": []}, "stop")
    prompt = tooled.engine.of_kind(Add)[0].requests[0].prompt_token_ids
    assert "get_weather" not in tooled.tokenizer.decode(prompt)
    assert call_both_ways(tooled, tools=[], tool_choice="auto")[0]["content"] == text
    assert call_both_ways(tooled)[0]["content"] == text


@pytest.mark.parametrize("part", ['{"ci', '{"city": "Ber'])
def test_tc08_a_call_that_is_cut_is_not_complete(tooled: Served, part: str) -> None:
    text = hermes(("get_weather", {"city": "Bern"}))
    cut = text[: text.index(part) + len(part)]
    tooled.says(text)
    message, reason = call_both_ways(tooled, tools=TOOLS, max_tokens=len(encode_answer(tooled.tokenizer, cut)))
    assert reason == "length"
    assert json.dumps({"city": "Bern"}).startswith(message["calls"][0]["arguments"])
    tooled.says(cut)  # and then EOS
    assert call_both_ways(tooled, tools=TOOLS)[1] == "stop"
    tooled.says("<tool_call>\n{")
    assert call_both_ways(tooled, tools=TOOLS) == ({"content": "<tool_call>\n{", "calls": []}, "stop")


def test_tc09_three_forms_of_no_content(tooled: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    prompts = []
    for content in ({"content": None}, {"content": ""}, {}):
        messages = [
            *USER,
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "unknown", "content": [{"type": "text", "text": "12:00"}]},
        ]
        prompts.append(ok(tooled.http.post("/tokenize", json={"messages": messages, "tools": TOOLS}))["tokens"])
        tooled.says("Noon.")
        ok(post(tooled, CHAT, messages=messages, tools=TOOLS))
        assert tooled.engine.of_kind(Add)[-1].requests[0].prompt_token_ids == prompts[-1]
    assert prompts[0] == prompts[1] == prompts[2]
    assert tooled.tokenizer.decode(prompts[0]).endswith('[assistant||now{"a": 1}][tool|12:00|unknown]')


REFERRING = {
    "type": "object",
    "properties": {
        "where": {"$ref": "#/$defs/Place"},
        "$ref": {"const": {"$ref": "#/not/a/reference"}},
        "twin": {"$ref": "#"},
    },
    "required": ["where"],
    "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}


def test_tc10_references_are_shown_and_hold(tooled: Served) -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": REFERRING}}
    tooled.says("a")
    ok(post(tooled, CHAT, tools=[tool]))
    prompt = tooled.tokenizer.decode(tooled.engine.of_kind(Add)[0].requests[0].prompt_token_ids)
    assert json.dumps(REFERRING) in prompt
    functions = [FunctionDefinition(name="go", parameters=REFERRING), FunctionDefinition(name="now")]
    check = jsonschema.Draft202012Validator(calls_schema(functions, parallel=True)).is_valid
    assert check([{"name": "go", "parameters": {"where": {"lat": 1}, "twin": {"where": {"lat": 2}}}}])
    assert check([{"name": "go", "parameters": {"where": {"lat": 1}, "$ref": {"$ref": "#/not/a/reference"}}}])
    assert check([{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}])
    assert not check([{"name": "go", "parameters": {"where": {"lat": "x"}}}])
    assert not check([{"name": "go", "parameters": {"where": {"lat": 1}, "twin": {}}}])
    assert not check([]) and not check([{"name": "other", "parameters": {}}])
    one = calls_schema(functions, parallel=False)
    assert not jsonschema.Draft202012Validator(one).is_valid([{"name": "now", "parameters": {}}] * 2)


NESTED: Body = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "$defs": {
                "Place": {
                    "type": "object",
                    "properties": {"lat": {"type": "integer"}, "near": {"$ref": "#/$defs/Place"}},
                    "required": ["lat"],
                    "additionalProperties": False,
                }
            },
            "type": "object",
            "properties": {"where": {"$ref": "#/$defs/Place"}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}


def check_calls(calls: list[Body], tools: list[Body]) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("tools", [TOOLS, [NESTED], [NESTED, TOOLS[0]]], ids=["plain", "with $ref", "both"])
def test_tc10_a_required_call_is_one_of_the_tools(tooled: Served, tools: list[Body], parallel: bool) -> None:
    tooled.engine.script = obedient(tooled.tokenizer, 518)
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": parallel}
    message, reason = call_both_ways(tooled, **fields)
    assert reason == "tool_calls" and message["content"] is None and message["calls"]
    assert parallel or len(message["calls"]) == 1
    check_calls(message["calls"], tools)


@pytest.mark.parametrize("tool", [*TOOLS, NESTED], ids=lambda tool: tool["function"]["name"])
def test_tc10_a_named_call_is_that_one(tooled: Served, tool: Body) -> None:
    tooled.engine.script = obedient(tooled.tokenizer, 518)
    choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
    message, reason = call_both_ways(tooled, tools=[*TOOLS, NESTED], tool_choice=choice)
    assert reason == "tool_calls" and message["content"] is None
    [call] = message["calls"]
    assert call["name"] == tool["function"]["name"]
    check_calls([call], [tool])
    message, reason = call_both_ways(tooled, tools=[*TOOLS, NESTED], tool_choice=choice, max_tokens=2)
    assert reason == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_forced_call_that_is_cut_before_it_begins_leaves_no_content(tooled: Served, choice: Any) -> None:
    tooled.says(' [{"name": "now", ' if choice == "required" else " \n \n")
    message = ok(post(tooled, CHAT, tools=TOOLS, tool_choice=choice, max_tokens=2))["choices"][0]["message"]
    assert message["content"] is None
    answer = call_both_ways(tooled, tools=TOOLS, tool_choice=choice, max_tokens=2)
    assert answer == ({"content": None, "calls": []}, "length")
    response = ok(tooled.http.post("/v1/responses", json={
        "input": "x", "tools": [{"type": "function", **tool["function"]} for tool in TOOLS], "max_output_tokens": 2,
        "tool_choice": choice if choice == "required" else {"type": "function", "name": "now"},
    }))  # fmt: skip
    assert (response["output"], response["status"]) == ([], "incomplete")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
@pytest.mark.parametrize("parameters", [{}, {"properties": {"x": {"type": "integer"}}}, {"type": ["object", "null"]}])
def test_forced_arguments_are_an_object_whatever_the_parameters_say(
    tooled: Served, choice: Any, parameters: Body
) -> None:
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    tooled.says("a")
    post(tooled, CHAT, tools=tools, tool_choice=choice)
    spec = tooled.engine.of_kind(Add)[0].requests[0].sampling.structured
    assert spec is not None
    valid = jsonschema.Draft202012Validator(json.loads(spec.value)).is_valid
    wrap = (lambda value: [{"name": "go", "parameters": value}]) if choice == "required" else (lambda value: value)
    assert valid(wrap({"x": 1})) and not valid(wrap("text")) and not valid(wrap(None))


def test_forced_calls_that_cannot_be(tooled: Served) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    error = error_of(post(tooled, CHAT, tools=TOOLS, tool_choice=named, response_format={"type": "json_object"}))
    assert "exclude" in error["message"]
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "uniqueItems": True}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"$ref": "#/$defs/none"}}}
    for tool in (odd, bad):
        error = error_of(post(tooled, CHAT, tools=[*TOOLS, tool], tool_choice="required"))
        assert error["param"] == "tool_choice" and "cannot be used" in error["message"]
    assert not tooled.engine.of_kind(Add)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_cannot_be(tooled: Served, fields: Body, param: str) -> None:
    assert error_of(post(tooled, CHAT, **fields))["param"] == param
    assert not tooled.engine.of_kind(Add)


@pytest.mark.parametrize("choice", ["required", "auto", "none"])
@pytest.mark.parametrize("kind", ["string", ["array", "null"], 5])
def test_parameters_that_are_no_object(tooled: Served, choice: str, kind: Any) -> None:
    tool = {"type": "function", "function": {"name": "x", "parameters": {"type": kind}}}
    error = error_of(post(tooled, CHAT, tools=[TOOLS[0], tool], tool_choice=choice))
    assert error["param"] == "tools" and "tools[1].function.parameters" in error["message"]
    assert not tooled.engine.of_kind(Add)


def test_tools_need_a_server_and_a_template_for_them(served: Served, llama_3: Tokenizer) -> None:
    served.says("a")
    error = error_of(post(served, CHAT, tools=TOOLS))
    assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
    assert ok(post(served, CHAT, tools=TOOLS, tool_choice="none"))
    with serve(llama_3, 518, enable_auto_tool_choice=True, tool_call_parser="hermes") as other:
        error = error_of(post(other, CHAT, tools=TOOLS))
    assert error["param"] == "tools" and "template" in error["message"]


def test_special_tokens_of_calls_are_seen(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    tokenizer = Tokenizer.load(checkpoints["tiny-llama-3.1"], template)
    with serve(tokenizer, 518, enable_auto_tool_choice=True, tool_call_parser="llama3_json") as served:
        call = encode_answer(tokenizer, '{"name": "now", "parameters": {}}')
        tag = tokenizer.token_id("<|python_tag|>")
        assert tag is not None and tokenizer.is_special(tag)
        served.says_tokens([tag, *call, 518])
        assert call_both_ways(served, tools=TOOLS)[0]["calls"] == [{"name": "now", "arguments": "{}"}]
        served.says_tokens([tag, *encode_answer(tokenizer, "hi"), 518])
        assert call_both_ways(served, tools=TOOLS)[0]["content"] == "<|python_tag|>hi"
        assert call_both_ways(served)[0]["content"] == "hi"


def test_streamed_logprobs_of_calls_are_the_plain_ones(tooled: Served) -> None:
    tooled.says("Wait.\n" + hermes(("now", {"a": [1, "é"]})))
    fields: Body = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = ok(post(tooled, CHAT, **fields))["choices"][0]
    choices = [c for chunk in stream(tooled, CHAT, **fields) for c in chunk["choices"]]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert [token for c in choices for token in c.get("token_ids", [])] == whole["token_ids"]


def test_the_official_client_reads_calls(tooled: Served) -> None:
    tooled.says("Hm.\n" + hermes(("get_weather", {"city": "Bern"}), ("now", {})))
    messages: Any = [{"role": "user", "content": "x"}]
    with tooled.openai.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as helper:  # type: ignore[arg-type]
        choice = helper.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
    assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"city": "Bern"}', "{}"]
    answer = tooled.openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[call-overload]
    assert isinstance(answer, openai.types.chat.ChatCompletion)
    # What it answered can be sent back to it.
    assert answer.choices[0].message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "x"} for call in answer.choices[0].message.tool_calls
    ]
    tooled.says("Done.")
    tooled.openai.chat.completions.create(model=MODEL, messages=[*messages, answer.choices[0].message, *results])
