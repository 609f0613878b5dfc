"""Requests to a served engine, and what must hold of every answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import Served

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
BOTH = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
Body = dict[str, Any]


def base(route: str) -> Body:
    return {"messages": USER} if route == CHAT else {"prompt": "Hello"}


def post(served: Served, route: str, **fields: Any) -> httpx.Response:
    return served.http.post(route, json=base(route) | fields)


def ok(response: httpx.Response) -> Body:
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response, status: int = 400) -> Body:
    """The error, in the one shape that all errors have."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def events(response: httpx.Response) -> list[Body]:
    """The chunks of a stream, which must end with [DONE] and nothing behind it."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def stream(served: Served, route: str, **fields: Any) -> list[Body]:
    return events(post(served, route, stream=True, **fields))


def choice_text(choice: Body) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def joined(chunks: list[Body], index: int = 0) -> tuple[str, str | None, Any]:
    """Text, finish_reason and stop_reason of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in choices]
    assert all(reason is None for reason in reasons[:-1])
    return "".join(map(choice_text, choices)), reasons[-1], choices[-1].get("stop_reason")


def plain(served: Served, route: str, **fields: Any) -> tuple[str, str | None, Any]:
    choice = ok(post(served, route, **fields))["choices"][0]
    return choice_text(choice), choice["finish_reason"], choice.get("stop_reason")


def both_ways(served: Served, route: str, **fields: Any) -> tuple[str, str | None, Any]:
    """The answer, streamed and not, which must be the same."""
    answer = plain(served, route, **fields)
    assert joined(stream(served, route, **fields)) == answer
    return answer
