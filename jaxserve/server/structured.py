"""Structured output in each of its spellings, to one record: what the answer's text must match."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from jaxserve.request import RequestError, StructuredSpec
from jaxserve.server.schemas import GenerationRequest

type Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
GUIDED: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def structured_spec(request: GenerationRequest) -> StructuredSpec | None:
    """What a request holds its answer to, None for nothing. Raises ``RequestError`` naming the field."""
    specs = [_response_format(request.response_format), _structured_outputs(request.structured_outputs)]
    for field, kind in GUIDED.items():
        if (value := getattr(request, field)) is not None:
            specs.append(make_spec(kind, value, field))
    given = [spec for spec in specs if spec is not None]
    if len(given) > 1:
        names = " and ".join(spec.field for spec in given)
        raise RequestError(f"Only one of {names} may be given.", param=given[0].field)
    return given[0] if given else None


def make_spec(kind: Kind, value: Any, field: str) -> StructuredSpec:
    """A checked record; the value in the form that clients write it in."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RequestError(f"{field}: the JSON Schema is not valid JSON.", param=field) from None
    fits = {
        "json": isinstance(value, dict | bool),
        "json_object": value is True,
        "choice": isinstance(value, list) and value and all(isinstance(item, str) and item for item in value),
        "regex": isinstance(value, str) and value,
        "grammar": isinstance(value, str) and value,
    }
    if not fits[kind]:
        needed = {"json": "a JSON Schema", "json_object": "true", "choice": "a list of strings"}.get(kind, "a string")
        raise RequestError(f"{field}: {kind} must be {needed}, and not empty.", param=field)
    text = "" if kind == "json_object" else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return StructuredSpec(kind=kind, value=text, field=field)


def _response_format(value: dict[str, Any] | None) -> StructuredSpec | None:
    field = "response_format"
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return make_spec("json_object", True, field)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return make_spec("json", schema, field)
        case {"type": "json_schema"}:
            raise RequestError("response_format.json_schema.schema is missing.", param=field)
    raise RequestError("response_format.type must be text, json_object or json_schema.", param=field)


def _structured_outputs(value: dict[str, Any] | None) -> StructuredSpec | None:
    field = "structured_outputs"
    given = {key: item for key, item in (value or {}).items() if item is not None}
    if not given:
        return None
    known = [kind for kind in KINDS if kind in given]
    if len(given) > 1 or not known:
        raise RequestError(f"{field} must hold exactly one of {', '.join(KINDS)}.", param=field)
    return make_spec(known[0], given[known[0]], field)
