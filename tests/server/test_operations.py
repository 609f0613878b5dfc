"""Keys, origins, prefixes, aborts and documentation."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.messages import Add
from jaxserve.server import openapi
from jaxserve.server.app import create_app
from jaxserve.server.auth import OPEN_PATHS
from jaxserve.tokenizer import Tokenizer
from tests.server.calls import BOTH, CHAT, COMPLETIONS, base, error_of, ok, post, stream
from tests.server.conftest import MODEL, Served, serve, wait_until

KEYS = ("sk-first", "sk-sécond")


@pytest.fixture(scope="module")
def locked(llama_3: Tokenizer) -> Iterator[Served]:
    with serve(llama_3, 518, api_key=KEYS, allowed_origins=("https://chat.example",)) as served:
        served.says("Hi")
        yield served


# ------------------------------------------------------------------ keys

GUARDED = [
    *(("GET", path) for path in ("/v1/models", f"/v1/models/{MODEL}", "/server_info", "/v1//models", "/V1/models")),
    *(("POST", path) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/abort", "/reset_prefix_cache")),
    *(("HEAD", "/v1/models"), ("OPTIONS", CHAT), ("GET", "/nothing"), ("GET", "/health/"), ("GET", "//health")),
    *(("GET", "/health/../v1/models"), ("GET", "/%2e/v1/models"), ("DELETE", "/v1/models"), ("GET", "/")),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "Bearer wrong",
        "Bearer",
        "sk-first",
        "Basic sk-first",
        "Bearer sk-firs",
        "Bearer sk-first sk-first",
    ],
)
def test_op12_no_route_without_a_key(locked: Served, method: str, path: str, authorization: str | None) -> None:
    headers = {"X-Request-Id": "mine"} | ({} if authorization is None else {"Authorization": authorization})
    response = locked.http.request(method, path, headers=headers, params={"api_key": KEYS[0]})
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"] == "mine"
    if method != "HEAD":
        error = error_of(response, 401)
        assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"
        assert not any(key in response.text for key in KEYS)


def test_op12_all_routes_of_the_application_are_open_by_name_or_closed(locked: Served) -> None:
    for operation in openapi.OPERATIONS:
        path = operation.path.replace("{model_id}", MODEL)
        status = locked.http.request(operation.method.upper(), path).status_code
        assert (status == 401) == (path not in OPEN_PATHS), path


@pytest.mark.parametrize("authorization", [f"Bearer {KEYS[0]}", f"bearer {KEYS[0]}", f"BEARER  {KEYS[1]}"])
def test_op12_any_of_the_keys_opens(locked: Served, authorization: str) -> None:
    headers = {"Authorization": authorization.encode()}
    assert ok(locked.http.post(CHAT, json=base(CHAT), headers=headers))  # type: ignore[arg-type]
    error_of(locked.http.get("/nothing", headers=headers), 404)  # type: ignore[arg-type]
    twice = [("Authorization", "Bearer x"), ("Authorization", f"Bearer {KEYS[0]}")]
    error_of(locked.http.get("/v1/models", headers=twice), 401)


def test_op12_no_key_is_told(locked: Served) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    for path in ("/server_info", "/metrics", "/openapi.json", "/docs", "/version"):
        text = locked.http.get(path, headers=headers).raise_for_status().text
        assert not any(key in text for key in KEYS)


# ------------------------------------------------------------------ origins

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-a"}


def test_origins_are_closed_unless_named(served: Served, locked: Served) -> None:
    for server, origin in ((served, "https://chat.example"), (locked, "https://evil.example")):
        headers = {"Origin": origin}
        assert server.http.options(CHAT, headers=headers | PREFLIGHT).status_code in (204, 401, 405)
        for response in (
            server.http.options(CHAT, headers=headers | PREFLIGHT),
            server.http.get("/version", headers=headers),
        ):
            assert not any(name.startswith("access-control-allow") for name in response.headers)


def test_a_named_origin_may_read_answers_and_refusals(locked: Served) -> None:
    headers = {"Origin": "https://chat.example"}
    preflight = locked.http.options(CHAT, headers=headers | PREFLIGHT)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-a"
    assert preflight.headers["access-control-allow-methods"] == "POST"
    refused = locked.http.post(CHAT, json=base(CHAT), headers=headers)
    answered = locked.http.post(CHAT, json=base(CHAT), headers=headers | {"Authorization": f"Bearer {KEYS[0]}"})
    assert (refused.status_code, answered.status_code) == (401, 200)
    for response in (preflight, refused, answered):
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert "access-control-allow-credentials" not in response.headers and response.headers["vary"] == "Origin"


def test_all_origins_with_and_without_cookies(llama_3: Tokenizer) -> None:
    headers = {"Origin": "https://a.example"}
    with serve(llama_3, 518, allowed_origins=("*",)) as served:
        assert served.http.get("/version", headers=headers).headers["access-control-allow-origin"] == "*"
    options: dict[str, Any] = {
        "allow_credentials": True,
        "allowed_headers": ("x-b",),
        "allowed_methods": ("GET", "POST"),
    }
    with serve(llama_3, 518, allowed_origins=("*",), **options) as served:
        answer = served.http.options(CHAT, headers=headers | PREFLIGHT)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert answer.headers["access-control-allow-headers"] == "x-b"
        assert answer.headers["access-control-allow-methods"] == "GET, POST"


# ------------------------------------------------------------------ a proxy in front


def test_a_prefix_that_a_proxy_takes_off(llama_3: Tokenizer) -> None:
    with serve(llama_3, 518, root_path="/llm", api_key=KEYS) as served:
        served.says("Hi")
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        assert ok(served.http.post(CHAT, json=base(CHAT), headers=headers))
        assert served.http.get("/version").status_code == 200
        for path in ("/v1/models", "/llm/v1/models", "/health/llm/v1/models"):
            error_of(served.http.get(path), 401)


# ------------------------------------------------------------------ aborts


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_ended_by_its_id(served: Served, route: str, streamed: bool) -> None:
    served.engine.step = 0.01
    served.says("la ", eos=False)
    responses: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: responses.append(post(served, route, stream=streamed, n=2, max_tokens=200, ignore_eos=True))
    )
    thread.start()
    call_id = served.engine.wait_for(Add).requests[0].request_id.rsplit("-", 2)[0]
    error_of(served.http.post("/v1/abort", json={}))
    assert ok(served.http.post("/v1/abort", json={"request_id": call_id[:-1]}))["aborted"] == 0
    assert ok(served.http.post("/v1/abort", json={"request_id": call_id})) == {"request_id": call_id, "aborted": 2}
    thread.join()
    wait_until(lambda: served.engine.num_running == 0)
    if streamed:
        assert responses[0].status_code == 200 and '"code":"request_aborted"' in responses[0].text
        assert responses[0].text.endswith("data: [DONE]\n\n") and call_id in responses[0].text
    else:
        assert error_of(responses[0], 499)["code"] == "request_aborted"
    assert ok(served.http.post("/v1/abort", json={"request_id": call_id}))["aborted"] == 0


# ------------------------------------------------------------------ what is told


def test_server_info(served: Served) -> None:
    info = ok(served.http.get("/server_info"))
    assert info["config"]["served_model_name"] == [MODEL] and "api_key" not in info["config"]
    assert info["limits"]["max_model_len"] == served.client.info.max_model_len


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_can_be_asked_without_a_body(served: Served, path: str) -> None:
    get, head = served.http.get(path), served.http.head(path)
    assert head.status_code == get.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == get.headers["content-length"]
    served.context.draining = True
    try:
        assert served.http.head(path).status_code == 503
        assert served.http.get(path).status_code == 503  # on the same connection
    finally:
        served.context.draining = False


def test_every_route_is_documented(served: Served) -> None:
    document = ok(served.http.get("/openapi.json"))
    documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    for method, path in documented:
        status = served.http.request(method, path.replace("{model_id}", MODEL)).status_code
        assert status in (200, 400) or (status == 404 and path == "/debug/steps"), (method, path)
    app = create_app(ServerConfig(engine=EngineConfig(model="unused")), served.client, served.tokenizer, {})
    routes = {
        (method, route.path_format)
        for route in app.routes
        for method in route.methods  # type: ignore[union-attr]
        if method not in ("OPTIONS", "HEAD")
    }
    assert routes == documented


def test_the_document_agrees_with_the_door(served: Served) -> None:
    served.says("a")
    document = ok(served.http.get("/openapi.json"))
    jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"]["ChatRequest"])

    def valid(name: str, body: Any) -> bool:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        return bool(jsonschema.Draft202012Validator(schema).is_valid(body))

    cases: list[dict[str, Any]] = [
        *({"temperature": value} for value in (0, 1e4, -0.1, 10001, "hot", None)),
        *({"top_p": value} for value in (0, 1, 1.1, -1)),
        *({"top_k": value} for value in (-1, 0, 2**31 - 1, 2**31, -2, 1.5)),
        *({"n": value} for value in (1, 0, 129, None)),
        *({"seed": value} for value in (2**63 - 1, 2**63, -(2**63), -(2**63) - 1)),
        *({"stop": value} for value in ("", "a", ["a"] * 16, ["a"] * 17, [""], "x" * 1025, None, 5)),
        *({"max_tokens": value} for value in (1, -1)),
        *({"truncate_prompt_tokens": value} for value in (-1, 1, -2)),
        *({"stop_token_ids": value} for value in ([1], [-1], [1] * 129)),
        *({"min_p": value} for value in (0, 1, -0.1, 1.1)),
        *({name: v} for name in ("presence_penalty", "frequency_penalty") for v in (-2, 2, -2.1, 2.1, "1")),
        *({"repetition_penalty": value} for value in (0.001, 1000, 0, 1001)),
        *({"logit_bias": value} for value in ({}, {"5": 100}, {"5": -100.5}, {"x": 1}, {"5": "1"}, {"5": None}, [])),
        *({"allowed_token_ids": value} for value in ([5], [], [-1], [520], None)),
        *({"bad_words": value} for value in ([], ["a"], [""], ["x"] * 65, "a")),
        *({"min_tokens": value} for value in (0, 1, -1)),
        *({"best_of": value} for value in (1, 2, 0, 129)),
        *({"prompt_logprobs": value} for value in (0, 20, 21, -1, True)),
        *({"priority": value} for value in (-1000, 1000, -1001, 1001, 0.5)),
        *({"deadline_ms": value} for value in (1000, 86_400_000, 0, 86_400_001)),
        *({"truncate_prompt_tokens": value} for value in (0, 256, 257)),
        *({"response_format": v} for v in ({"type": "text"}, {"type": "yaml"}, {}, {"type": "json_schema"}, "text")),
        *({"structured_outputs": v} for v in ({}, {"choice": ["a"]}, {"x": 1}, {"json": {}, "regex": "a"}, [])),
        *({"guided_regex": value} for value in ("a", "", 5)),
        *({"guided_choice": value} for value in (["a"], [], [""], "a")),
        {"guided_grammar": ""},
        *({"stream_options": value, "stream": True} for value in ({}, {"include_usage": True}, {"include_usage": 1})),
    ]
    for fields in cases:
        for route, name in ((CHAT, "ChatRequest"), (COMPLETIONS, "CompletionRequest")):
            assert valid(name, base(route) | fields) == (post(served, route, **fields).status_code == 200), fields
    for messages in (
        [],
        [{"role": "user", "content": "x"}],
        [{"role": "x", "content": ""}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "x"}, {"role": "assistant"}],
        [{}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": 1}],
    ):
        assert valid("ChatRequest", {"messages": messages}) == (
            post(served, CHAT, messages=messages).status_code == 200
        )
    for fields in (
        *({"tool_choice": value} for value in ("none", "auto", "x", {}, {"type": "function"}, 5)),
        {"max_tokens": 0},
        {"max_completion_tokens": 0},
    ):
        assert valid("ChatRequest", base(CHAT) | fields) == (post(served, CHAT, **fields).status_code == 200), fields
    for fields in (
        *({"top_logprobs": value} for value in (0, 20, 21, -1)),
        *({"max_output_tokens": value} for value in (1, 0)),
        *({"tool_choice": value} for value in ("auto", "x", {"type": "function"})),
        *({"include": value} for value in ([], ["message.output_text.logprobs"], ["x"])),
    ):
        response = served.http.post("/v1/responses", json={"input": "x", **fields})
        assert valid("ResponsesRequest", {"input": "x", **fields}) == (response.status_code == 200), fields
    assert valid("ChatCompletion", ok(post(served, CHAT, logprobs=True, top_logprobs=2, return_token_ids=True)))
    assert valid("Completion", ok(post(served, COMPLETIONS, logprobs=2)))
    assert all(valid("ChatChunk", chunk) for chunk in stream(served, CHAT))
    assert valid("ErrorResponse", post(served, CHAT, n=0).json())


def test_the_page_needs_no_network(served: Served) -> None:
    response = served.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    page = response.text
    assert all(f"{operation.method.upper()} {operation.path}" in page for operation in openapi.OPERATIONS)
    assert "chat_template_kwargs" in page and "http://" not in page and "https://" not in page


def test_the_page_can_be_read(served: Served) -> None:
    page = served.http.get("/docs").raise_for_status().text

    def row(name: str) -> set[str]:
        """What is said of a field, wherever it stands."""
        return set(re.findall(rf"<tr><td><code>{name}</code><td>(.*?)(?=<tr>|</table>)", page))

    assert row("logprobs") == {"boolean<td>", "integer, 0 to 20<td>"}
    assert row("seed") == {"integer, -2<sup>63</sup> to 2<sup>63</sup> - 1<td>"}
    assert row("repetition_penalty") == {"number, 0.001 to 1,000<td>Above 1: tokens used before become less likely."}
    assert row("min_tokens") == {"integer, at least 0<td>Neither EOS nor a stop ends the answer before it has so many."}
    assert row("response_format") == {
        '{type: "text" or "json_object"} or {type: "json_schema", json_schema: {schema: object or boolean}}<td>'
    }
    assert row("encoding_format") == {'"base64" or "float"<td>'}
    assert row("text_1") == {"string or list of string<td>Required."}
    assert row("input") >= {
        "string or list of (integer, 0 to 519) or list of string or list of (list of (integer, 0 to 519))<td>Required."
    }
    assert row("truncation") == {'"disabled"<td>'} and row("background") == {"false<td>"}
    assert row("add_generation_prompt") & {"boolean<td>false: the assistant's turn is not opened."}
    for wrong in ("object or object", "e+", "None", "≤"):
        assert wrong not in page
    assert set(re.findall(r'href="#(\w+)"', page)) <= set(re.findall(r'id="(\w+)"', page))
