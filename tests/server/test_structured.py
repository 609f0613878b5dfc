"""Every spelling of structured output comes to one record, which is checked before it reaches the engine."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import psutil
import pytest

from jaxserve.engine.messages import Add
from jaxserve.request import RequestError, StructuredSpec
from jaxserve.server import grammar_check
from jaxserve.server.schemas import GenerationRequest
from jaxserve.server.structured import structured_spec
from tests.server.calls import BOTH, CHAT, Body, both_ways, error_of, ok, plain, post
from tests.server.conftest import Served, wait_until
from tests.server.obedient import obedient

SCHEMA = {"type": "object", "properties": {"größe": {"enum": ["Fjällräv"]}}}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": "start: x"}}, "grammar", "start: x"),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"guided_grammar": "start: x"}, "grammar", "start: x"),
    ],
)
def test_spellings(fields: Body, kind: Any, value: Any) -> None:
    spec = structured_spec(GenerationRequest(**fields))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assert spec == StructuredSpec(kind=kind, value=text, field=next(iter(fields)))


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_nothing_asked_for(fields: Body) -> None:
    assert structured_spec(GenerationRequest(**fields)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        {"structured_outputs": {"json": {}, "regex": "a"}},
        {"structured_outputs": {"xml": 1}},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": "{"},
        {"guided_regex": ""},
        {"guided_choice": []},
        {"guided_choice": [""]},
    ],
)
def test_what_cannot_be_names_the_field(fields: Body) -> None:
    with pytest.raises(RequestError) as caught:
        structured_spec(GenerationRequest(**fields))
    assert caught.value.param == next(iter(fields))
    assert len(str(caught.value)) < 200


def test_one_of_them_only() -> None:
    with pytest.raises(RequestError, match="Only one of response_format and guided_regex"):
        structured_spec(GenerationRequest(response_format={"type": "json_object"}, guided_regex="a"))


@pytest.fixture
def obeying(served: Served) -> Served:
    """Its engine answers with what the grammar of a request allows."""
    served.engine.script = obedient(served.tokenizer, served.eos_id)
    return served


ADDRESS = {
    "type": "object",
    "properties": {
        "größe": {"enum": ["Fjällräv", "北风", "🦊"]},
        "names": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["größe", "names"],
    "additionalProperties": False,
}


def is_address(text: str) -> bool:
    return jsonschema.Draft202012Validator(ADDRESS).is_valid(json.loads(text))


@BOTH
@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ADDRESS}}}, is_address),
        ({"structured_outputs": {"json": ADDRESS}}, is_address),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"regex": "[äb]{3}"}}, re.compile("[äb]{3}").fullmatch),
        ({"structured_outputs": {"choice": ["yes", "北风"]}}, lambda text: text in ("yes", "北风")),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, re.compile("x[0-9]{2}").fullmatch),
        ({"guided_json": ADDRESS}, is_address),
        ({"guided_json": json.dumps(ADDRESS)}, is_address),
        ({"guided_regex": "[äb]{3}"}, re.compile("[äb]{3}").fullmatch),
        ({"guided_choice": ["yes", "🦊"]}, lambda text: text in ("yes", "🦊")),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, re.compile("x[0-9]").fullmatch),
    ],
)  # fmt: skip
def test_so05_every_spelling_reaches_the_engine(obeying: Served, route: str, fields: Body, fits: Any) -> None:
    text, reason, _ = both_ways(obeying, route, **fields, max_tokens=200)
    assert reason == "stop" and fits(text)
    assert [add.requests[0].sampling.structured for add in obeying.engine.of_kind(Add)] == [
        structured_spec(GenerationRequest(**fields))
    ] * 2


def test_so05_the_responses_route_too(obeying: Served) -> None:
    form = {"type": "json_schema", "name": "x", "schema": ADDRESS, "strict": True}
    body = ok(obeying.http.post("/v1/responses", json={"input": "Hello", "text": {"format": form}}))
    assert is_address(body["output"][0]["content"][0]["text"])
    bad = {"input": "Hello", "text": {"format": {**form, "schema": {"type": "nothing"}}}}
    assert error_of(obeying.http.post("/v1/responses", json=bad))["param"] == "text"


@BOTH
@pytest.mark.parametrize("count", [1, 2, 5])
def test_so09_max_tokens_cuts_the_text_and_says_so(obeying: Served, route: str, count: int) -> None:
    """Also within a character."""
    for choices in (["🦊🦊🦊"], ['{"a": 1}' * 3]):
        text, reason, _ = both_ways(obeying, route, guided_choice=choices, max_tokens=count)
        assert reason == "length" and choices[0].startswith(text.rstrip("�"))


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_json": {"$ref": "#"}}, "no text can match it"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "Invalid type: x"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "look-around"),
        ({"guided_grammar": "start: unknown"}, "unknown"),
        ({"guided_grammar": "x" * 32_001}, "at most 32000 characters"),
    ],
)
def test_so03_what_cannot_be_enforced_never_reaches_the_engine(
    served: Served, route: str, streamed: bool, fields: Body, reason: str
) -> None:
    error = error_of(post(served, route, stream=streamed, **fields))
    assert error["param"] == next(iter(fields)) and reason in error["message"]
    assert not served.engine.of_kind(Add)


def test_so03_what_takes_too_long_to_compile_is_refused_and_others_go_on(
    obeying: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it go on burning time for nobody."""
    monkeypatch.setattr(grammar_check, "COMPILE_SECONDS", 0.5)
    assert plain(obeying, CHAT, guided_regex="before")[0] == "before"
    process = grammar_process(obeying)
    obeying.engine.received.clear()
    begin = time.monotonic()
    error = error_of(post(obeying, CHAT, guided_json={"type": "integer", "multipleOf": 3_000_017}))
    assert error["param"] == "guided_json" and "too long" in error["message"]
    assert time.monotonic() - begin < 5 and not process.is_running()
    assert not obeying.engine.of_kind(Add)
    monkeypatch.undo()
    assert plain(obeying, CHAT, guided_regex="after")[0] == "after"


def test_so03_what_ends_the_compiler_is_refused_and_others_go_on(obeying: Served) -> None:
    assert plain(obeying, CHAT, guided_regex="before")[0] == "before"
    process = grammar_process(obeying)
    process.suspend()
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(post, obeying, CHAT, guided_regex="during")
        time.sleep(0.3)
        process.kill()
        error = error_of(refused.result())
    assert error["param"] == "guided_regex" and "too large" in error["message"]
    assert plain(obeying, CHAT, guided_regex="after")[0] == "after"
    process = grammar_process(obeying)
    process.kill()  # while nobody uses it
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert plain(obeying, CHAT, guided_regex="later")[0] == "later"


def grammar_process(served: Served) -> psutil.Process:
    process = served.context.grammar_check._process
    assert process is not None
    return psutil.Process(process.pid)
