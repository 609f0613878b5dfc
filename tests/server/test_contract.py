"""Every body and every event of a broad matrix of requests, against the schemas of OpenAI's objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxserve.tokenizer import Tokenizer
from tests.server import openai_schemas as schemas
from tests.server.calls import BOTH, CHAT, COMPLETIONS, Body, base, events, ok, post
from tests.server.conftest import MODEL, Served, encode_answer, serve
from tests.server.test_tools import TEMPLATE, TOOLS, hermes

TEXT = "Hi 🫠, stop it."


@pytest.fixture(scope="module")
def everything(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with every option that adds to an answer."""
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    tokenizer = Tokenizer.load(checkpoints["tiny-llama-3.1"], template)
    options: dict[str, Any] = {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "enable_per_request_metrics": True,
    }
    with serve(tokenizer, 518, context=1024, **options) as served:
        yield served


# Each option of a dimension: its fields, and the extensions that it brings.
SHAPES: list[Body] = [{}, {"n": 2}, {"echo": True}]
PROBABILITIES: dict[str, list[Body]] = {
    CHAT: [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}],
    COMPLETIONS: [{}, {"logprobs": 0}, {"logprobs": 3}],
}
ENDINGS: list[Body] = [{}, {"max_tokens": 3}, {"stop": "stop"}, {"stop": ["zzz"], "include_stop_str_in_output": True}]
EXTRAS: list[Body] = [
    {},
    {"return_token_ids": True, "return_tokens_as_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


def wanted(fields: Body) -> tuple[str, ...]:
    names = ["metrics", "reasoning"]
    if fields.get("return_token_ids"):
        names += ["token_ids", "prompt_token_ids"]
    return (*names, "stop_reason") if "stop" in fields else tuple(names)


def check_both_ways(served: Served, route: str, fields: Body) -> None:
    """The plain answer and each chunk match their schemas, and say the same."""
    plain_fields = {name: value for name, value in fields.items() if name != "stream_options"}
    whole = ok(post(served, route, **plain_fields))
    schema, chunk_schema = (
        (schemas.chat_completion, schemas.chat_chunk)
        if route == CHAT
        else (schemas.completion, schemas.completion_chunk)
    )
    schemas.check(whole, schema(*wanted(fields)))
    chunks = events(post(served, route, stream=True, **fields))
    for chunk in chunks:
        schemas.check(chunk, chunk_schema(*wanted(fields)))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    for choice in whole["choices"]:
        check_choice(choice, [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]])
    if "stream_options" in fields:
        assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []


def check_choice(whole: Body, parts: list[Body]) -> None:
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    if "text" in whole:
        assert "".join(part["text"] for part in parts) == whole["text"]
    else:
        deltas = [part["delta"] for part in parts]
        assert "".join(delta.get("content", "") for delta in deltas) == (whole["message"]["content"] or "")
        assert "".join(delta.get("reasoning", "") for delta in deltas) == whole["message"].get("reasoning", "")
        calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert "".join(calls) == "".join(c["function"]["arguments"] for c in whole["message"].get("tool_calls", []))
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    for key, value in (whole["logprobs"] or {}).items():
        if isinstance(value, list):
            assert [entry for part in logprobs for entry in part[key]] == value
    assert [token for part in parts for token in part.get("token_ids", [])] == whole.get("token_ids", [])


@BOTH
@pytest.mark.parametrize("extras", EXTRAS, ids=["", "ids", "usage"])
def test_a_matrix_of_requests(everything: Served, route: str, extras: Body) -> None:
    everything.says(TEXT)
    for shape, probabilities, ending in itertools.product(SHAPES, PROBABILITIES[route], ENDINGS):
        fields = shape | probabilities | ending | extras
        check_both_ways(everything, route, fields)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "<think>Hm.</think>", "<think>Hm.</think>Yes.", "Yes.", hermes(("now", {}))),
        *("<think>Hm.</think>Yes." + hermes(("now", {}), ("get_weather", {"city": "Bern"})), hermes(("now", 5))),
        *("<tool_call>", "<think>", hermes(("now", {}))[:-20]),
    ],
)
@pytest.mark.parametrize("probabilities", PROBABILITIES[CHAT][::2], ids=["", "logprobs"])
def test_a_matrix_of_replies(everything: Served, text: str, probabilities: Body) -> None:
    everything.says(text)
    for fields in ({}, {"parallel_tool_calls": False}, {"n": 2, "return_token_ids": True}, {"max_tokens": 7}):
        check_both_ways(everything, CHAT, {"tools": TOOLS, **probabilities, **fields})


@BOTH
def test_broken_bytes_and_special_tokens(everything: Served, route: str) -> None:
    bos = everything.tokenizer.bos_id
    lead = [token for token in range(256) if everything.tokenizer.token_bytes(token) == b"\xf0"]
    everything.says_tokens([*encode_answer(everything.tokenizer, "ab"), bos, *lead, bos, *lead, everything.eos_id])
    for fields in ({}, {"skip_special_tokens": False}, {"max_tokens": 4}):
        check_both_ways(everything, route, {**fields, **PROBABILITIES[route][2]})


def test_models_and_errors(everything: Served) -> None:
    schemas.check(ok(everything.http.get("/v1/models")), schemas.MODELS)
    schemas.check(ok(everything.http.get(f"/v1/models/{MODEL}")), schemas.MODEL)
    faults: list[tuple[str, str, Any]] = [
        ("POST", CHAT, {}),
        ("POST", CHAT, {"messages": []}),
        ("POST", COMPLETIONS, {"prompt": "a", "n": 0}),
        ("POST", COMPLETIONS, {"prompt": [10**9]}),
        ("POST", "/v1/responses", {"input": 1}),
        ("GET", "/v1/models/other", None),
        ("GET", "/nothing", None),
        ("PUT", CHAT, None),
        ("POST", CHAT, base(CHAT) | {"model": "other"}),
    ]
    for method, path, body in faults:
        response = everything.http.request(method, path, json=body)
        assert 400 <= response.status_code < 500
        schemas.check(response.json(), schemas.ERROR)


def test_a_fault_in_a_stream_is_an_error_event(everything: Served) -> None:
    everything.says_tokens([*encode_answer(everything.tokenizer, "ab"), RuntimeError("no")])
    for route in (CHAT, COMPLETIONS):
        *_, last = events(post(everything, route, stream=True))
        schemas.check(last, schemas.ERROR)


def test_the_schemas_refuse_what_is_wrong(everything: Served) -> None:
    everything.says("Hi")
    answer = ok(post(everything, CHAT))
    for path, value in (("usage", None), ("object", "chat"), ("surprise", 1), ("choices", [])):
        with pytest.raises(jsonschema.ValidationError):
            schemas.check(answer | {path: value}, schemas.chat_completion("metrics"))
