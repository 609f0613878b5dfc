"""JSON Schemas of OpenAI's answers, written from what it documents. Closed: a key that is not listed is a fault.

``EXTENSIONS`` are the keys that vLLM's users know besides; each test says which of them it expects.
"""

from __future__ import annotations

import functools
from typing import Any

import jsonschema

Schema = dict[str, Any]


def closed(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema, **keywords: Any) -> Schema:
    return {"type": "array", "items": items, **keywords}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [{"type": "null"}, schema]}


TEXT = {"type": "string"}
SOME_TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
LOGPROB = {"type": "number", "minimum": -9999, "maximum": 0}
IDS = array(COUNT)

USAGE = closed(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {
        "prompt_tokens_details": closed({"cached_tokens": COUNT}),
        "completion_tokens_details": closed({}, {"reasoning_tokens": COUNT}),
    },
)
METRICS = closed(
    {
        name: {"type": "number", "minimum": 0}
        for name in (
            *("queue_time_ms", "prefill_time_ms", "time_to_first_token_ms", "decode_time_ms", "mean_itl_ms"),
            "tokens_per_second",
        )
    }
)
EXTENSIONS: dict[str, dict[str, Schema]] = {
    "metrics": {"answer": METRICS},
    "token_ids": {"choice": IDS},
    "prompt_token_ids": {"answer": IDS, "choice": IDS},
    "stop_reason": {"choice": {"type": ["integer", "string"]}},
    "reasoning": {"message": SOME_TEXT},
}


def extended(level: str, wanted: tuple[str, ...]) -> Schema:
    return {name: EXTENSIONS[name][level] for name in wanted if level in EXTENSIONS[name]}


TOP_LOGPROB = {"token": TEXT, "logprob": LOGPROB, "bytes": nullable(array({"type": "integer", "maximum": 255}))}
CHAT_LOGPROBS = nullable(
    closed(
        {
            "content": nullable(array(closed(TOP_LOGPROB | {"top_logprobs": array(closed(TOP_LOGPROB), maxItems=20)}))),
            "refusal": {"type": "null"},
        }
    )
)
TOOL_CALL = closed(
    {"id": SOME_TEXT, "type": {"const": "function"}, "function": closed({"name": SOME_TEXT, "arguments": TEXT})}
)
TOOL_CALL_DELTA = {
    "anyOf": [
        closed({"index": COUNT, "id": SOME_TEXT, "type": {"const": "function"},
                "function": closed({"name": SOME_TEXT, "arguments": TEXT})}),
        closed({"index": COUNT, "function": closed({"arguments": SOME_TEXT})}),
    ]
}  # fmt: skip
FINISH = {"enum": ["stop", "length", "tool_calls", "content_filter"]}
COMPLETION_FINISH = {"enum": ["stop", "length", "content_filter"]}


def answer_of(kind: str, choices: Schema, required: Schema, wanted: tuple[str, ...], **optional: Schema) -> Schema:
    base = {"id": SOME_TEXT, "object": {"const": kind}, "created": COUNT, "model": SOME_TEXT, "choices": choices}
    return closed(base | required, optional | extended("answer", wanted))


@functools.cache
def chat_completion(*wanted: str) -> Schema:
    message = closed(
        {"role": {"const": "assistant"}, "content": nullable(TEXT), "refusal": {"type": "null"}},
        {"tool_calls": array(TOOL_CALL, minItems=1), **extended("message", wanted)},
    )
    choice = closed(
        {"index": COUNT, "message": message, "logprobs": CHAT_LOGPROBS, "finish_reason": FINISH},
        extended("choice", wanted),
    )
    return answer_of("chat.completion", array(choice, minItems=1), {"usage": USAGE}, wanted)


@functools.cache
def chat_chunk(*wanted: str) -> Schema:
    delta = closed(
        {},
        {
            "role": {"const": "assistant"},
            "content": TEXT,
            "tool_calls": array(TOOL_CALL_DELTA, minItems=1, maxItems=1),
            **extended("message", wanted),
        },
    )
    choice = closed(
        {"index": COUNT, "delta": delta, "logprobs": CHAT_LOGPROBS, "finish_reason": nullable(FINISH)},
        extended("choice", wanted),
    )
    return answer_of("chat.completion.chunk", array(choice, maxItems=1), {}, wanted, usage=USAGE)


def _completion_choice(finish: Schema, wanted: tuple[str, ...]) -> Schema:
    logprobs = closed(
        {
            "tokens": array(TEXT),
            "token_logprobs": array(nullable(LOGPROB)),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": LOGPROB})),
            "text_offset": array(COUNT),
        }
    )
    return closed(
        {"index": COUNT, "text": TEXT, "logprobs": nullable(logprobs), "finish_reason": finish},
        extended("choice", wanted),
    )


@functools.cache
def completion(*wanted: str) -> Schema:
    choices = array(_completion_choice(COMPLETION_FINISH, wanted), minItems=1)
    return answer_of("text_completion", choices, {"usage": USAGE}, wanted)


@functools.cache
def completion_chunk(*wanted: str) -> Schema:
    choices = array(_completion_choice(nullable(COMPLETION_FINISH), wanted), maxItems=1)
    return answer_of("text_completion", choices, {}, wanted, usage=USAGE)


FAULT = {"message": SOME_TEXT, "type": SOME_TEXT, "param": nullable(SOME_TEXT), "code": nullable(SOME_TEXT)}
ERROR = closed({"error": closed(FAULT)})
MODEL = closed(
    {"id": SOME_TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": SOME_TEXT},
    {"root": SOME_TEXT, "max_model_len": COUNT},
)
MODELS = closed({"object": {"const": "list"}, "data": array(MODEL)})


def check(value: Any, schema: Schema) -> None:
    """Raises ``jsonschema.ValidationError`` if the value does not match."""
    validator = _validators.setdefault(id(schema), jsonschema.Draft202012Validator(schema))
    validator.validate(value)


_validators: dict[int, jsonschema.Draft202012Validator] = {}
"""By the identity of their schemas, which live as long as this module: checking a schema takes its time."""
