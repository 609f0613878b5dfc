"""``/v1/responses``: one generation path, another dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxserve.engine.messages import Add
from jaxserve.server.schemas import SamplingRequest
from jaxserve.tokenizer import Tokenizer
from tests.server.calls import CHAT, USER, Body, error_of, ok, post
from tests.server.conftest import MODEL, Served, encode_answer, serve
from tests.server.test_tools import TEMPLATE, TOOLS, hermes

RESPONSES = "/v1/responses"
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def thoughtful(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that knows tools and reasoning."""
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    tokenizer = Tokenizer.load(checkpoints["tiny-llama-3.1"], template)
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serve(tokenizer, 518, context=1024, reasoning_parser="qwen3", **options) as served:
        yield served


def respond(served: Served, given: Any = "Hello", **fields: Any) -> Body:
    response = ok(served.http.post(RESPONSES, json={"input": given, **fields}))
    Response.model_validate(response, strict=True)
    return response


def events_of(served: Served, given: Any = "Hello", **fields: Any) -> list[Body]:
    """The events of a stream, each valid and in its place."""
    answer = served.http.post(RESPONSES, json={"input": given, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
        EVENT.validate_python(event)
        events.append(event)
    return events


def without_ids(value: Any) -> Any:
    """What two answers to the same request share."""
    if isinstance(value, dict):
        skipped = ("id", "call_id", "item_id", "created_at", "sequence_number")
        return {key: without_ids(item) for key, item in value.items() if key not in skipped}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def sent_prompt(served: Served) -> str:
    return served.tokenizer.decode(served.engine.of_kind(Add)[-1].requests[0].prompt_token_ids)


def test_a_text(served: Served) -> None:
    served.says("Hello 🫠 friend.")
    response = respond(served)
    assert response["status"] == "completed" and response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    [item] = response["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello 🫠 friend.", "annotations": [], "logprobs": []}]
    ok(post(served, CHAT))
    ids = [add.requests[0].prompt_token_ids for add in served.engine.of_kind(Add)]
    assert ids[0] == ids[1]


def test_events_add_up_to_the_plain_answer(served: Served) -> None:
    served.says("Hello 🫠 friend.")
    events = events_of(served)
    kinds = [event["type"].removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[:4] == begin and kinds[-4:] == end and set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == events[-4]["text"] == "Hello 🫠 friend."
    assert events[2]["item"]["content"] == [] and events[3]["part"]["text"] == ""
    assert without_ids(events[-1]["response"]) == without_ids(respond(served))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_an_answer_that_is_cut(served: Served) -> None:
    served.says("la ", eos=False)
    response = respond(served, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    events = events_of(served, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(response)


def test_thoughts_text_and_calls_are_items(thoughtful: Served) -> None:
    calls = hermes(("get_weather", {"city": "Bern"}), ("now", {}))
    thoughtful.says(f"<think>\nHm.\n</think>\n\nLet me see.\n{calls}")
    response = respond(thoughtful, tools=FLAT_TOOLS)
    reasoning, message, weather, now = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "Let me see."
    assert (weather["name"], weather["arguments"]) == ("get_weather", '{"city": "Bern"}')
    assert (now["name"], now["arguments"], now["status"]) == ("now", "{}", "completed")
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < response["usage"]["output_tokens"]
    events = events_of(thoughtful, tools=FLAT_TOOLS)
    assert without_ids(events[-1]["response"]) == without_ids(response)
    joined = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    assert joined == '{"city": "Bern"}{}'
    # What it said can be sent back, and reads as chat's messages do.
    thoughtful.says("Sunny.")
    outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": "x"} for item in (weather, now)]
    respond(thoughtful, [*USER, *response["output"], *outputs], tools=FLAT_TOOLS, instructions="Be brief.")
    prompt = sent_prompt(thoughtful)
    assert prompt.endswith(
        '[system|Be brief.|][user|Hello|][assistant|Let me see.|get_weather{"city": "Bern"}now{}]'
        f"[tool|x|{weather['call_id']}][tool|x|{now['call_id']}]"
    )


def test_a_call_that_is_cut_is_incomplete(thoughtful: Served) -> None:
    text = hermes(("get_weather", {"city": "Bern"}))
    thoughtful.says(text[: text.index("ern")])
    [call] = respond(thoughtful, tools=FLAT_TOOLS)["output"]
    assert call["status"] == "incomplete" and call["arguments"] == '{"city": "B'


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "Hello"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    ],
)
def test_forms_of_input(served: Served, given: Any) -> None:
    served.says("a")
    respond(served, "Hello")
    expected = sent_prompt(served)
    respond(served, given)
    assert sent_prompt(served) == expected


def test_logprobs_on_demand(served: Served) -> None:
    served.says("ab")
    fields: Body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = respond(served, **fields)
    entries = response["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries][:2] == ["a", "b"] and len(entries[0]["top_logprobs"]) == 2
    assert events_of(served, **fields)[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": FLAT_TOOLS}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"temperature": -1}, "temperature"),
        ({"priority": 1001}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"n": 2}, "n"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "text"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_cannot_be_names_the_field(served: Served, fields: Body, param: str, streamed: bool) -> None:
    body = {"input": "Hello", "stream": streamed} | fields
    assert error_of(served.http.post(RESPONSES, json=body))["param"] == param
    assert not served.engine.of_kind(Add)


@pytest.mark.parametrize(
    "fields",
    [
        *({"max_tokens": 5}, {"max_completion_tokens": 5}, {"response_format": {"type": "json_object"}}),
        *({"guided_regex": "a"}, {"best_of": 2}, {"logprobs": True}, {"prompt_logprobs": 0}, {"echo": True}),
        *({"messages": []}, {"add_generation_prompt": False}, {"reasoning_effort": "low"}, {"return_token_ids": True}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_of_other_routes_are_refused_by_name(served: Served, fields: Body) -> None:
    served.says("a")
    [name] = fields
    error = error_of(served.http.post(RESPONSES, json={"input": "Hello", **fields}))
    assert error["param"] == name and name in error["message"] and error["code"] == "unsupported_parameter"
    respond(served, **{name: None})


def test_what_shapes_a_chat_shapes_a_response(served: Served) -> None:
    """Everything that the routes share under one name reaches the engine, from this one too."""
    served.says("a")
    fields: Body = {
        "temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "seed": 3, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "allowed_token_ids": [5, 6],
        "bad_words": ["b"], "min_tokens": 1, "stop": ["zzz"], "stop_token_ids": [9], "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "truncate_prompt_tokens": 3,
        "structured_outputs": {"regex": "a+"}, "priority": 7, "cache_salt": "mine", "deadline_ms": 5000,
    }  # fmt: skip
    assert fields.keys() | {"model", "stream", "spaces_between_special_tokens"} == {*SamplingRequest.__struct_fields__}
    respond(served, **fields, max_output_tokens=2)
    ok(post(served, CHAT, **fields, max_tokens=2))
    response, chat = (add.requests[0] for add in served.engine.of_kind(Add))
    assert response.sampling == chat.sampling and response.sampling.stop == ("zzz",)
    assert response.prompt_token_ids == chat.prompt_token_ids and len(chat.prompt_token_ids) == 3
    assert (response.priority, response.cache_salt) == (7, "mine")
    assert response.deadline is not None and 4 < response.deadline - response.arrival_time < 6


def test_neutral_fields_are_taken(served: Served) -> None:
    served.says("a")
    respond(
        served, store=True, background=False, truncation="disabled", previous_response_id=None, metadata={"a": "b"},
        text={"format": {"type": "text"}, "verbosity": "low"}, reasoning={"effort": "low"}, user="x", n=1,
        stream_options={"include_obfuscation": False},
    )  # fmt: skip


def test_a_fault_while_streaming_is_an_event(served: Served) -> None:
    served.says_tokens([*encode_answer(served.tokenizer, "ab"), RuntimeError("logits are not finite")])
    last = events_of(served)[-1]
    assert last["type"] == "error" and last["code"] == "generation_failed" and "not finite" in last["message"]
    error_of(served.http.post(RESPONSES, json={"input": "x"}), 500)


def test_the_official_client(served: Served) -> None:
    served.says("Hello there.")
    response = served.openai.responses.create(model=MODEL, input="Hello", instructions="Be kind.")
    assert response.output_text == "Hello there."
    with served.openai.responses.stream(model=MODEL, input="Hello") as stream:
        assert stream.get_final_response().output_text == "Hello there."
