"""Every spelling of structured output comes to one record; until it is enforced, it is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.request import RequestError, StructuredSpec
from jaxserve.server.schemas import GenerationRequest
from jaxserve.server.structured import structured_spec
from tests.server.calls import BOTH, Body, error_of, post
from tests.server.conftest import Served

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
        {"guided_grammar": "x" * 2_000_000},
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


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_it_is_refused_until_it_is_enforced(served: Served, route: str, streamed: bool) -> None:
    error = error_of(post(served, route, guided_choice=["a"], stream=streamed))
    assert error["param"] == "guided_choice" and error["code"] == "unsupported_parameter"
