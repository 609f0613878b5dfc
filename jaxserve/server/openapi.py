"""The OpenAPI document, made from the types that requests are read with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve import __version__
from jaxserve.engine.admission import MAX_PRIORITY
from jaxserve.engine.messages import ModelInfo
from jaxserve.request import (
    INT64,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
)
from jaxserve.server import schemas
from jaxserve.server.context import MAX_DEADLINE_MS
from jaxserve.server.responses import schemas as responses
from jaxserve.server.responses.conversion import INCLUDABLE, NEUTRAL
from jaxserve.server.structured import KINDS
from jaxserve.server.tools import NAME


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
    Operation(
        "post", "/v1/embeddings", "Vectors of whole texts",
        schemas.EmbeddingRequest, schemas.EmbeddingList,
    ),
    Operation("post", "/v1/score", "How near texts are to each other", schemas.ScoreRequest, schemas.ScoreList),
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
    Operation("post", "/reset_prefix_cache", "Forget cached blocks"),
    Operation("get", "/debug/steps", "What the last steps did, with --enable-debug-steps"),
    Operation("get", "/server_info", "Configuration and limits"),
    Operation("get", "/openapi.json", "This document"),
    Operation("get", "/docs", "This document as a page", media_type="text/html"),
)  # fmt: skip


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that needs all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING = {"type": "string"}
_NAME = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_PARTS = {"type": "array", "items": _ref("TextPart")}
_CALLS = {"type": "array", "items": _ref("ToolCall")}
_BY_HAND: dict[str, Any] = {
    "TextPart": _object(type={"const": "text"}, text=_STRING),
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
        "anyOf": [
            {"properties": {"role": {"const": "assistant"}}},
            {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
        ],
    },
    "InputItem": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "type": {"const": "message"},
                    "role": {"enum": list(schemas.ROLES)},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ref("InputText")}]},
                },
                "required": ["role", "content"],
            },
            _object(type={"const": "function_call"}, call_id=_STRING, name=_STRING, arguments=_STRING),
            _object(type={"const": "function_call_output"}, call_id=_STRING, output=_STRING),
            _object(type={"const": "reasoning"}, content={"type": "array", "items": _ref("ReasoningText")}),
        ],
    },
    "InputText": _object(type={"enum": ["input_text", "output_text", "text"]}, text=_STRING),
    "ReasoningText": _object(type={"const": "reasoning_text"}, text=_STRING),
    "FunctionTool": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "name": _NAME,
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
        },
        "required": ["type", "name"],
    },
}
"""Types that requests hold as plain objects, since templates are given all of what a client sends."""
_STOPS = {"maxLength": MAX_STOP_LENGTH, "minLength": 1}
_NOT_EMPTY = {"minLength": 1}
_LIMITS: dict[str, dict[str, Any]] = {
    **{name: {"minimum": low, "maximum": high} for name, (low, high) in RANGES.items()},
    "messages": {"items": _ref("Message"), "minItems": 1},
    "tools": {"items": _ref("Tool")},
    "top_k": {"minimum": -1, "exclusiveMaximum": 2**31},
    "n": {"minimum": 1, "maximum": 128},
    "best_of": {"minimum": 1, "maximum": 128},
    "seed": {"minimum": INT64.start, "exclusiveMaximum": INT64.stop},
    "max_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "stop": {**_STOPS, "maxItems": MAX_STOP_STRINGS, "items": {"type": "string", **_STOPS}},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "truncate_prompt_tokens": {"minimum": -1, "not": {"const": 0}},
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "deadline_ms": {"minimum": 1, "maximum": MAX_DEADLINE_MS},
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "allowed_token_ids": {"minItems": 1},
    "bad_words": {"maxItems": MAX_BAD_WORDS, "items": {"type": "string", **_STOPS}},
    "structured_outputs": {"maxProperties": 1, "propertyNames": {"enum": [*KINDS]}},
    "guided_regex": _NOT_EMPTY,
    "guided_choice": {"minItems": 1, "items": {"type": "string", **_NOT_EMPTY}},
    "guided_grammar": _NOT_EMPTY,
}
"""What the types do not say: keywords that hold for a property of this name in every request."""


def _replaced(info: ModelInfo | None) -> dict[tuple[str, str], Any]:
    """Properties that the types say too little of, by the names of type and property."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    if info is not None:
        ids["items"] = _ids(info)
    text = {"type": "string", "minLength": 1}
    several = [{"type": "array", "items": items, "minItems": 1} for items in (text, ids)]
    items = {"type": "array", "items": _ref("InputItem"), "minItems": 1}
    replaced: dict[tuple[str, str], Any] = {
        ("CompletionRequest", "prompt"): {"anyOf": [text, ids, *several]},
        ("EmbeddingRequest", "input"): {"anyOf": [text, ids, *several]},
        ("ScoreRequest", "text_1"): {"anyOf": [text, several[0]]},
        ("ScoreRequest", "text_2"): {"anyOf": [text, several[0]]},
        ("ResponsesRequest", "input"): {"anyOf": [{"type": "string"}, items]},
        ("ResponsesRequest", "tools"): {"anyOf": [{"type": "null"}, {"type": "array", "items": _ref("FunctionTool")}]},
        ("ResponsesRequest", "include"): {
            "anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": [INCLUDABLE]}}]
        },
        ("FunctionDefinition", "name"): _NAME,
        ("ChatRequest", "tool_choice"): _tool_choice(_object(type={"const": "function"}, function=_object(name=_NAME))),
        ("ResponsesRequest", "tool_choice"): _tool_choice(_object(type={"const": "function"}, name=_NAME)),
    }
    for kind in ("ChatRequest", "CompletionRequest"):
        replaced[kind, "response_format"] = {"anyOf": [{"type": "null"}, _RESPONSE_FORMAT]}
    for name, neutral in NEUTRAL.items():
        replaced["ResponsesRequest", name] = {"enum": [None, *neutral]}
    return replaced


_RESPONSE_FORMAT = {
    "anyOf": [
        _object(type={"enum": ["text", "json_object"]}),
        _object(type={"const": "json_schema"}, json_schema=_object(schema={"type": ["object", "boolean"]})),
    ]
}


def _tool_choice(named: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"enum": [None, "none", "auto", "required"]}, named]}


def _ids(info: ModelInfo) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "exclusiveMaximum": info.vocab_size}


def _limits_of(info: ModelInfo, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The same for what depends on the model."""
    ids = _ids(info)
    logprobs = {"minimum": 0, "maximum": info.max_logprobs}
    length = min(info.max_model_len, info.max_kv_tokens)
    return {
        "model": {"enum": [None, *names]} if names else {},
        "stop_token_ids": {"items": ids},
        "allowed_token_ids": {"items": ids},
        "tokens": {"items": ids},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "dimensions": {"enum": [None, info.hidden_size]},
        "max_tokens": {"maximum": length - 1},
        "max_completion_tokens": {"maximum": length - 1},
        "max_output_tokens": {"minimum": 1, "maximum": length - 1},
        "truncate_prompt_tokens": {"maximum": length},
    }


@functools.lru_cache(maxsize=4)
def document(info: ModelInfo | None = None, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """The whole document; once the engine is ready, with its limits. ``names``: of the model, empty if any will do."""
    limits = _limits_of(info, names) if info else {}
    limits = {name: _LIMITS.get(name, {}) | limits.get(name, {}) for name in _LIMITS.keys() | limits.keys()}
    types = {
        kind
        for operation in OPERATIONS
        for kind in (operation.request, operation.response, operation.event, schemas.ErrorResponse, schemas.Tool)
        if kind is not None
    }
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for kind in {operation.request for operation in OPERATIONS if operation.request}:
        for name, schema in components[kind.__name__]["properties"].items():
            schema.update(_keywords(limits.get(name, {}), schema))
    components["ChatRequest"]["properties"]["max_tokens"]["minimum"] = 1  # nothing but an echo needs 0
    for (kind_name, name), schema in _replaced(info).items():
        properties = components[kind_name]["properties"]
        told = {key: value for key, value in properties[name].items() if key == "description"}
        properties[name] = schema | told
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


_OF_NUMBERS = ("minimum", "maximum", "exclusiveMaximum")


def _keywords(limits: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """What to add to a property; keywords for items go where its type is an array, those for numbers nowhere else."""
    options = schema.get("anyOf", [schema])
    for option in options:
        if option.get("type") == "array" and "items" in limits:
            option["items"] = limits["items"]
    numeric = any(option.get("type") in ("integer", "number") for option in options)
    left_out = ("items",) if numeric else ("items", *_OF_NUMBERS)
    return {keyword: value for keyword, value in limits.items() if keyword not in left_out}


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": _ref_to(operation.response)}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _ref_to(operation.event)}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {
                "description": "What went wrong, and in which field.",
                "content": {"application/json": {"schema": _ref_to(schemas.ErrorResponse)}},
            },
        },
    }
    if operation.request is not None:
        body = {"application/json": {"schema": _ref_to(operation.request)}}
        described["requestBody"] = {"required": True, "content": body}
    if "{model_id}" in operation.path:
        described["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _ref_to(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    return {} if kind is None else _ref(kind.__name__)
