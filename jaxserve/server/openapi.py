"""The OpenAPI document, made from the types that requests are read with, and a page of it that needs no network."""

from __future__ import annotations

import functools
import html
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve import __version__
from jaxserve.request import INT64, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from jaxserve.server import schemas
from jaxserve.server.responses import schemas as responses


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    """What the events of a streamed answer hold."""
    media_type: str = "application/json"


OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Answer a conversation",
        schemas.ChatRequest, schemas.ChatCompletion, schemas.ChatChunk,
    ),
    Operation(
        "post", "/v1/completions", "Continue a text",
        schemas.CompletionRequest, schemas.Completion, schemas.Completion,
    ),
    Operation(
        "post", "/v1/responses", "Answer a conversation, in the newer dialect; nothing is stored",
        responses.ResponsesRequest, responses.ResponseObject,
    ),
    Operation("get", "/v1/models", "The models that are served", response=schemas.ModelList),
    Operation("get", "/v1/models/{model_id}", "One of them", response=schemas.ModelCard),
    Operation("post", "/v1/abort", "End a running call by the id of its response", schemas.AbortRequest),
    Operation(
        "post", "/tokenize", "Token ids of a text or a conversation",
        schemas.TokenizeRequest, schemas.TokenizeResponse,
    ),
    Operation("post", "/detokenize", "The text of token ids", schemas.DetokenizeRequest, schemas.DetokenizeResponse),
    Operation("get", "/health", "200 while a completion would work, else 503"),
    Operation("get", "/ready", "The same"),
    Operation("get", "/ping", "The same"),
    Operation("get", "/version", "The version of the server"),
    Operation("get", "/load", "How many requests run or wait"),
    Operation("get", "/metrics", "Prometheus metrics", media_type="text/plain"),
    Operation("get", "/server_info", "Configuration and limits"),
    Operation("get", "/openapi.json", "This document"),
    Operation("get", "/docs", "This document as a page", media_type="text/html"),
)  # fmt: skip

_PARTS = {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}}
_CALLS = {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}
_BY_HAND: dict[str, Any] = {
    "TextPart": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
    "Message": {
        "type": "object",
        "description": "One turn. tool_calls are the assistant's; a tool's answer names its call by tool_call_id.",
        "properties": {
            "role": {"enum": list(schemas.ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "null"}, _PARTS]},
            "reasoning": {"type": ["string", "null"]},
            "tool_calls": {"anyOf": [{"type": "null"}, _CALLS]},
            "tool_call_id": {"type": ["string", "null"]},
        },
        "required": ["role"],
    },
}  # fmt: skip
"""Types that requests hold as plain objects, since templates are given all of what a client sends."""
_STOPS = {"maxLength": MAX_STOP_LENGTH, "minLength": 1}
_LIMITS: dict[str, dict[str, Any]] = {
    "messages": {"items": {"$ref": "#/components/schemas/Message"}, "minItems": 1},
    "tools": {"items": {"$ref": "#/components/schemas/Tool"}},
    "prompt": {"minLength": 1, "minItems": 1},
    "temperature": {"minimum": 0, "maximum": 1e4},
    "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "exclusiveMaximum": 2**31},
    "n": {"minimum": 1, "maximum": 128},
    "best_of": {"minimum": 1, "maximum": 128},
    "seed": {"minimum": INT64.start, "exclusiveMaximum": INT64.stop},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "stop": {**_STOPS, "maxItems": MAX_STOP_STRINGS, "items": {"type": "string", **_STOPS}},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS, "items": {"type": "integer", "minimum": 0}},
    "truncate_prompt_tokens": {"minimum": -1},
    "top_logprobs": {"minimum": 0},
    "tokens": {"items": {"type": "integer", "minimum": 0}},
}
"""What the types do not say: keywords that hold for a property of this name in every request."""


@functools.cache
def document() -> dict[str, Any]:
    """The whole document."""
    types = {
        kind
        for operation in OPERATIONS
        for kind in (operation.request, operation.response, operation.event, schemas.ErrorResponse, schemas.Tool)
        if kind is not None
    }
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for kind in {operation.request for operation in OPERATIONS if operation.request}:
        for name, schema in components[kind.__name__]["properties"].items():
            schema.update(_limits(name, schema))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components | _BY_HAND,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _limits(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Keywords for a property; those for items go to where its type is an array."""
    limits = dict(_LIMITS.get(name, {}))
    for option in schema.get("anyOf", [schema]):
        if option.get("type") == "array" and "items" in limits:
            option["items"] = limits["items"]
    limits.pop("items", None)
    return limits


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": _ref(operation.response)}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _ref(operation.event)}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {
                "description": "What went wrong, and in which field.",
                "content": {"application/json": {"schema": _ref(schemas.ErrorResponse)}},
            },
        },
    }
    if operation.request is not None:
        body = {"application/json": {"schema": _ref(operation.request)}}
        described["requestBody"] = {"required": True, "content": body}
    if "{model_id}" in operation.path:
        described["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _ref(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    return {} if kind is None else {"$ref": f"#/components/schemas/{kind.__name__}"}


@functools.cache
def page() -> str:
    """The document as HTML: routes, and under each the fields that it takes."""
    components = document()["components"]["schemas"]
    parts = []
    for operation in OPERATIONS:
        parts.append(f"<h2><code>{operation.method.upper()} {operation.path}</code></h2><p>{operation.summary}.</p>")
        if operation.request is not None:
            parts.append(_table(components[operation.request.__name__]))
    for name in ("Message", "TextPart", "Tool", "FunctionDefinition", "StreamOptions"):
        parts.append(f'<h2 id="{name}">{name}</h2>{_table(components[name])}')
    return (
        f'<!doctype html><meta charset="utf-8"><title>jaxserve {__version__}</title><style>{_STYLE}</style>'
        f'<h1>jaxserve {__version__}</h1><p>Made from <a href="openapi.json">openapi.json</a>.</p>{"".join(parts)}'
    )


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}h2{margin-top:2em;font-size:1.1em}"
    "table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2em 1em .2em 0;vertical-align:top}"
)


def _table(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema["properties"].items():
        needed = "required" if name in required else ""
        rows.append(f"<tr><td><code>{name}</code><td>{_type(field)}<td>{needed}")
    return f"<table>{''.join(rows)}</table>"


def _type(field: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in field:
        words = " or ".join(_type(option) for option in field["anyOf"] if option != {"type": "null"})
    elif "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        words = f'<a href="#{name}">{name}</a>'
    elif "enum" in field or "const" in field:
        words = ", ".join(html.escape(str(value)) for value in field.get("enum", [field.get("const")]))
    elif field.get("type") == "array":
        words = f"list of ({_type(field.get('items', {}))})"
    else:
        kinds = field.get("type", "anything")
        words = kinds if isinstance(kinds, str) else " or ".join(kind for kind in kinds if kind != "null")
    for word, sign in (("minimum", "≥"), ("maximum", "≤"), ("exclusiveMaximum", "&lt;")):
        if word in field:
            words += f" {sign} {field[word]:g}"
    return words
