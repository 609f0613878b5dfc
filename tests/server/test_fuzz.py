"""Bodies that nobody would write: never a 5xx, never a request left behind."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from jaxserve.tokenizer import Tokenizer
from tests.server import openai_schemas as schemas
from tests.server.conftest import Served, serve, wait_until
from tests.server.test_tools import TOOLS

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/abort")
DOCUMENTED = (*ROUTES, "/v1/embeddings", "/v1/score")
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hé 🫠"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "12:00"},
]  # fmt: skip
SEEDS: list[dict[str, Any]] = [
    {"messages": TURNS, "tools": TOOLS, "tool_choice": "none", "logprobs": True, "top_logprobs": 2, "max_tokens": 5},
    {"prompt": ["Hello", "b"], "n": 2, "stop": ["x", "yz"], "logprobs": 1, "seed": -5, "stream": True},
    {"prompt": [[1, 2], [3]], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream_options": None, "max_tokens": 3},
    {"input": [{"role": "user", "content": "x"}], "text": {"format": {"type": "text"}}, "max_output_tokens": 4},
    {"tokens": [1, 2, 3]},
    {"prompt": "x", "guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}}, "max_tokens": 3},
    {"messages": TURNS, "structured_outputs": {"regex": "(a|b){2,3}"}, "max_tokens": 3},
    {"request_id": "resp-1"},
]
PIECES = (
    *(b"null", b"true", b"-1", b"1e400", b"NaN", b"[]", b"{}", b'""', b'"\\ud800"', b'"\\u0000"', b"[[[[", b"\xff"),
    *(b'"stop":', b'"n":', b'"stream":true,', b'"messages":', b'"prompt":', b"9" * 30, b"0.1", b",", b":", b"}", b'"'),
)


def mutated(rng: random.Random) -> bytes:
    body = bytearray(json.dumps(rng.choice(SEEDS), ensure_ascii=rng.random() < 0.5).encode())
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(5):
            case 0:
                body[at:at] = rng.choice(PIECES)
            case 1:
                del body[at : at + rng.randrange(1, 12)]
            case 2:
                body[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                body[at:at] = body[at : at + rng.randrange(1, 40)]
            case 4:
                body[at : at + rng.randrange(1, 6)] = rng.choice(PIECES)
    return bytes(body)


@pytest.fixture(scope="module")
def fuzzed(llama_3: Tokenizer) -> Iterator[Served]:
    with serve(llama_3, 518) as served:
        served.says("Hi")
        yield served


@pytest.mark.parametrize("cases", [250, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_body_breaks_the_server(fuzzed: Served, cases: int) -> None:
    rng = random.Random(cases)
    seen: collections.Counter[int] = collections.Counter()
    for _ in range(cases):
        body = mutated(rng)
        response = fuzzed.http.post(rng.choice(ROUTES), content=body)
        seen[response.status_code] += 1
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            schemas.check(response.json(), schemas.ERROR)
            assert len(response.text) < 1000
    assert seen[200] > cases / 50 and seen[400] > cases / 5
    wait_until(lambda: fuzzed.engine.num_running == 0 and fuzzed.client.num_open == 0)
    assert fuzzed.http.get("/health").status_code == 200


@pytest.mark.slow
def test_the_document_against_the_server(llama_3: Tokenizer) -> None:
    seen: collections.Counter[int] = collections.Counter()
    with serve(llama_3, 518, accept_any_model=True) as served:
        served.says("Hi")
        document = schemathesis.openapi.from_dict(served.http.get("/openapi.json").json())
        for route in DOCUMENTED:
            ask(served, route, document[route]["POST"].as_strategy(), seen)
    assert seen.total() >= 2000 and seen[200] > 0.3 * seen.total(), seen


def ask(served: Served, route: str, cases: Any, seen: collections.Counter[int]) -> None:
    """Sends bodies that are valid by the document, and counts the answers' statuses."""

    @settings(
        max_examples=350, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=cases)
    def send(case: Any) -> None:
        response = served.http.post(route, json=case.body)
        seen[response.status_code] += 1
        assert response.status_code < 500, (case.body, response.text)

    send()
