"""The HTTP interface as clients see it: OpenAI's own client, and raw requests."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from math import inf, nan
from typing import Any

import httpx
import openai
import pytest

from jaxserve.engine.messages import Abort, Add, Finish
from jaxserve.server import event_stream, parse
from tests.server.calls import (
    BOTH,
    CHAT,
    COMPLETIONS,
    USER,
    Body,
    base,
    both_ways,
    choice_text,
    error_of,
    joined,
    ok,
    plain,
    post,
    stream,
)
from tests.server.conftest import CONTEXT, MODEL, Served, encode_answer, serve, wait_until

# ------------------------------------------------------------------ streams


def test_st01_usage_comes_once(served: Served) -> None:
    served.says("Hello there, friend.")
    chunks = stream(served, CHAT, max_tokens=20, stream_options={"include_usage": True})
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage == ok(post(served, CHAT, max_tokens=20))["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_idle_stream_is_sent_comments(served: Served, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    served.says("ab", eos=False)
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.1)
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    served.engine.hold.set()
    with served.http.stream("POST", path, json=body | {"stream": True, "max_tokens": 3}) as response:
        lines = response.iter_lines()
        try:
            assert [next(lines) for _ in range(6)] == [": ping", ""] * 3
        finally:
            served.engine.hold.clear()
        events = [line for line in lines if line and line != ": ping"]
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    texts = [event for event in events if '"text":"' in event or '"content":"' in event]
    assert len(texts) >= 3


def test_running_usage_on_demand(served: Served) -> None:
    served.says("Hello", eos=False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(served, COMPLETIONS, max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 4


@BOTH
def test_st03_no_event_without_choices(served: Served, route: str) -> None:
    served.says("Hello there, friend.")
    assert all(chunk["choices"] for chunk in stream(served, route))
    assert all(chunk["choices"] for chunk in stream(served, route, stream_options={"include_usage": False}))


def test_st05_role_comes_once_a_choice(served: Served) -> None:
    served.says("Hello there, friend.")
    chunks = stream(served, CHAT, n=2)
    for index in (0, 1):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta and delta["content"] for delta in deltas[1:-1])
        assert deltas[-1] == {}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("max_tokens", [3, 200])
def test_st06_a_stream_ends_with_done(served: Served, max_tokens: int) -> None:
    served.says("word ", eos=False)
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
        body = json.dumps({"messages": USER, "stream": True, "max_tokens": max_tokens}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        received = b"".join(iter(lambda: raw.recv(65536), b""))
    assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


@BOTH
def test_st08_finish_reason_length(served: Served, route: str) -> None:
    served.says("Hello there, friend.")
    text, reason, _ = both_ways(served, route, max_tokens=3)
    assert reason == "length" and text


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_st12_a_client_that_leaves_frees_the_engine(served: Served, route: str, streamed: bool) -> None:
    served.engine.step = 0.01
    served.says("la ", eos=False)
    body = json.dumps(base(route) | {"max_tokens": 200, "ignore_eos": True, "stream": streamed})
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    connection.request("POST", route, body)
    served.engine.wait_for(Add)
    if streamed:
        connection.getresponse().read(10)
    assert served.engine.num_running == 1
    connection.close()
    if streamed:
        connection = None  # the response holds the socket too
    abort = served.engine.wait_for(Abort, seconds=1.5)
    assert abort.request_ids == [served.engine.of_kind(Add)[0].requests[0].request_id]
    wait_until(lambda: served.engine.num_running == 0)
    assert served.client.num_open == 0


def test_many_clients_that_leave(served: Served) -> None:
    served.engine.step = 0.01
    served.says("la ", eos=False)
    body = json.dumps({"prompt": "x", "max_tokens": 200, "n": 2})
    connections = [http.client.HTTPConnection(served.url.removeprefix("http://")) for _ in range(50)]
    for connection in connections:
        connection.request("POST", COMPLETIONS, body)
    wait_until(lambda: served.engine.num_running == 100)
    for connection in connections:
        connection.close()
    wait_until(lambda: served.engine.num_running == 0)
    served.engine.step = 0.0
    assert plain(served, COMPLETIONS, max_tokens=2)[1] == "length"


@BOTH
@pytest.mark.parametrize("fixture", ["served", "served_2"])
def test_st16_tk02_streamed_text_is_the_plain_text(request: pytest.FixtureRequest, fixture: str, route: str) -> None:
    served: Served = request.getfixturevalue(fixture)
    text = "The quick brown fox: 🫠 龜 สวัสดี 👨‍👩‍👧 naïve"
    served.says(text)
    chunks = stream(served, route, max_tokens=150)
    assert not any("\ufffd" in choice_text(choice) for chunk in chunks for choice in chunk["choices"])
    assert joined(chunks) == plain(served, route, max_tokens=150) == (text, "stop", None)


@BOTH
def test_st18_broken_bytes_are_valid_json(served: Served, route: str) -> None:
    rng = random.Random(1)
    for _ in range(10):
        served.says_tokens([rng.randrange(256) for _ in range(40)])
        text, _, _ = both_ways(served, route, max_tokens=40)
        text.encode()


@BOTH
@pytest.mark.parametrize("ending", ["eos", "length", "stop"])
def test_st21_a_broken_tail_is_the_same_in_both_modes(served: Served, route: str, ending: str) -> None:
    lead = [token for token in range(256) if served.tokenizer.token_bytes(token) == b"\xf0"]
    served.says_tokens([*encode_answer(served.tokenizer, "ab"), *lead, served.eos_id])
    if ending == "length":
        assert both_ways(served, route, max_tokens=3)[:2] == ("ab\ufffd", "length")
    elif ending == "eos":
        assert both_ways(served, route)[:2] == ("ab\ufffd", "stop")
    else:
        served.says_tokens([*encode_answer(served.tokenizer, "ab"), *lead, *encode_answer(served.tokenizer, "!")])
        assert both_ways(served, route, stop="!") == ("ab\ufffd", "stop", "!")


@pytest.mark.parametrize("streamed", [False, True])
def test_st22_choices_are_numbered_by_prompt(served: Served, streamed: bool) -> None:
    prompts = ["one", "two", "three"]
    first = {tuple(served.tokenizer.encode(p)): encode_answer(served.tokenizer, p[0].upper())[0] for p in prompts}
    served.engine.script = lambda r: itertools.repeat(first[tuple(r.prompt_token_ids)])
    fields: Body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 1}
    if streamed:
        chunks = stream(served, COMPLETIONS, **fields)
        texts = [joined(chunks, index)[0] for index in range(6)]
    else:
        choices = ok(post(served, COMPLETIONS, **fields))["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        texts = [choice["text"] for choice in choices]
    assert texts == ["oneO", "oneO", "twoT", "twoT", "threeT", "threeT"]


def test_an_engine_fault_before_and_after_the_first_byte(served: Served) -> None:
    served.says_tokens([*encode_answer(served.tokenizer, "ab"), RuntimeError("logits are not finite")])
    error = error_of(post(served, CHAT), 500)
    assert "not finite" in error["message"]
    *chunks, last = stream(served, CHAT)
    assert "".join(choice_text(c) for chunk in chunks for c in chunk["choices"]) == "ab"
    assert last["error"] == error


# ------------------------------------------------------------------ stop strings


@BOTH
def test_sp01_a_stop_string_across_tokens(served: Served, route: str) -> None:
    served.says("The capital of France is Paris.")
    assert both_ways(served, route, stop=["l of F"], max_tokens=40) == ("The capita", "stop", "l of F")
    finish = served.engine.wait_for(Finish)
    text, _, _ = plain(served, route, max_tokens=finish.kept_tokens)
    assert text.startswith("The capital of F")  # kept: the tokens up to the one that completed it
    answer = ok(post(served, route, stop=["l of F"], max_tokens=40))
    assert answer["usage"]["completion_tokens"] == finish.kept_tokens


@BOTH
def test_sp04_no_empty_deltas(served: Served, route: str) -> None:
    served.says("ab ab ab ab abc", eos=False)
    chunks = stream(served, route, stop=["abc" * 60, "zzz"], max_tokens=15)
    texts = [choice_text(choice) for chunk in chunks for choice in chunk["choices"]]
    assert all(texts[1:-1])
    assert "".join(texts) == plain(served, route, max_tokens=15)[0]


@BOTH
def test_sp05_stopping_on_the_eos_id_changes_no_text(served: Served, route: str) -> None:
    served.says("Hello there, friend.")
    natural = both_ways(served, route, max_tokens=60)
    named = both_ways(served, route, max_tokens=60, stop_token_ids=[served.eos_id])
    assert natural == ("Hello there, friend.", "stop", None)
    assert named == ("Hello there, friend.", "stop", served.eos_id)


@BOTH
@pytest.mark.parametrize("stop", [[""], "", [None], ["a"] * 17, ["x" * 100_000], 5])
def test_sp08_stop_strings_that_cannot_be(served: Served, route: str, stop: Any) -> None:
    error = error_of(post(served, route, stop=stop))
    assert error["param"] == "stop"
    assert len(error["message"]) < 300


@BOTH
@pytest.mark.parametrize("stop", [[], None, list("abcdefghijklmnop"), "~"])
def test_sp08_stop_strings_that_can(served: Served, route: str, stop: Any) -> None:
    served.says("HELLO")
    assert plain(served, route, stop=stop)[:2] == ("HELLO", "stop")


def test_sp09_a_stop_string_is_removed(served: Served) -> None:
    served.says("Yes.<|im_end|>\nNo.")
    assert both_ways(served, CHAT, stop=["<|im_end|>\n"])[:2] == ("Yes.", "stop")
    kept = both_ways(served, CHAT, stop=["<|im_end|>\n"], include_stop_str_in_output=True)
    assert kept[:2] == ("Yes.<|im_end|>\n", "stop")


def test_tk05_a_stop_token_is_not_in_the_text(served: Served) -> None:
    token = encode_answer(served.tokenizer, "#")[0]
    served.says("abc#def")
    assert both_ways(served, CHAT, stop_token_ids=[token]) == ("abc", "stop", token)


# ------------------------------------------------------------------ log-probabilities


def test_lp06_logprobs_nought(served: Served) -> None:
    served.says("abc", eos=False)
    logprobs = ok(post(served, COMPLETIONS, logprobs=0, max_tokens=3))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{}] * 3,
        "text_offset": [5, 6, 7],  # after "Hello"
    }
    chat = ok(post(served, CHAT, logprobs=True, top_logprobs=0, max_tokens=3))["choices"][0]["logprobs"]
    assert [entry["logprob"] for entry in chat["content"]] == [-0.5] * 3
    assert all(entry["top_logprobs"] == [] for entry in chat["content"])
    assert ok(post(served, CHAT, logprobs=False))["choices"][0]["logprobs"] is None


def test_lp07_logprobs_of_chat(served: Served) -> None:
    served.says("aé", eos=False)
    ids = encode_answer(served.tokenizer, "aé")
    content = ok(post(served, CHAT, logprobs=True, top_logprobs=2, max_tokens=len(ids)))["choices"][0]
    entries = content["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == [served.tokenizer.token_bytes(i) for i in ids]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert ok(post(served, CHAT, logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    for fields in (
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
    ):
        assert error_of(post(served, CHAT, **fields))["param"] == "top_logprobs"


def test_lp02_a_streamed_echo_begins_with_the_prompt(served: Served) -> None:
    served.says(" on and on.")
    fields: Body = {"prompt": "The river flows", "echo": True, "max_tokens": 40}
    chunks = stream(served, COMPLETIONS, **fields)
    assert chunks[0]["choices"][0]["text"] == "The river flows"
    assert joined(chunks) == plain(served, COMPLETIONS, **fields) == ("The river flows on and on.", "stop", None)


@BOTH
@pytest.mark.parametrize("logprob", [-inf, nan, 1e-6, -1e30])
def test_lp05_no_number_that_json_does_not_have(served: Served, route: str, logprob: float) -> None:
    served.says("ab")
    served.engine.logprob = lambda request: logprob
    fields: Body = {"logprobs": 2} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    for response in (post(served, route, **fields), post(served, route, stream=True, **fields)):
        assert response.status_code == 200
        assert not any(word in response.text for word in ("NaN", "Infinity", "nan", "inf"))
    values = ok(post(served, route, **fields))["choices"][0]["logprobs"]
    found = values["token_logprobs"] if route == COMPLETIONS else [entry["logprob"] for entry in values["content"]]
    assert set(found) <= {-9999.0, 0.0}


def test_lp11_alternatives_are_decoded_each_on_its_own(served: Served) -> None:
    served.says("é")
    [token] = [token for token in range(256) if served.tokenizer.token_bytes(token) == b"\xc3"]
    served.says_tokens([token, *encode_answer(served.tokenizer, "a"), served.eos_id])
    first, *_ = ok(post(served, CHAT, logprobs=True, top_logprobs=5))["choices"][0]["logprobs"]["content"]
    ids = [token, *(other for other in range(5) if other != token)][:5]  # as the engine's script has it
    assert [bytes(top["bytes"]) for top in first["top_logprobs"]] == [served.tokenizer.token_bytes(i) for i in ids]
    assert [top["token"] for top in first["top_logprobs"]] == [served.tokenizer.token_text(i) for i in ids]


@BOTH
def test_streamed_logprobs_are_the_plain_ones(served: Served, route: str) -> None:
    served.says("Hi 🫠 there, stop here")
    fields: Body = {"logprobs": 2} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    fields |= {"stop": "op h", "max_tokens": 60, "return_token_ids": True}
    whole = ok(post(served, route, **fields))["choices"][0]
    choices = [c for chunk in stream(served, route, **fields) for c in chunk["choices"]]
    parts = [c["logprobs"] for c in choices if c["logprobs"]]
    for key in ("content",) if route == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts for entry in part[key]] == whole["logprobs"][key]
    assert [token for c in choices for token in c.get("token_ids", [])] == whole["token_ids"]


# ------------------------------------------------------------------ validation


@BOTH
@pytest.mark.parametrize("seed", [2**63 - 1, -1, -(2**63), 0, None])
def test_va05_seeds_that_work(served: Served, route: str, seed: int | None) -> None:
    served.says("a")
    ok(post(served, route, seed=seed))
    sent = served.engine.of_kind(Add)[0].requests[0].seed
    assert seed is None or sent == seed


@BOTH
@pytest.mark.parametrize("seed", [2**64, 2**63, -(2**63) - 1, 1.5, "1", True])
def test_va05_seeds_that_do_not(served: Served, route: str, seed: Any) -> None:
    assert error_of(post(served, route, seed=seed))["param"] == "seed"


@BOTH
@pytest.mark.parametrize("max_tokens", [-1, "16", 1.5, 10**12, 10**30, True])
def test_va06_max_tokens_that_cannot_be(served: Served, route: str, max_tokens: Any) -> None:
    assert error_of(post(served, route, max_tokens=max_tokens))["param"] == "max_tokens"


def test_va06_max_tokens_nought_and_null(served: Served) -> None:
    served.says("la ", eos=False)
    assert both_ways(served, COMPLETIONS, max_tokens=0) == ("", "length", None)
    assert both_ways(served, COMPLETIONS, max_tokens=0, echo=True, n=2) == ("Hello", "length", None)
    assert not served.engine.of_kind(Add)
    assert error_of(post(served, CHAT, max_tokens=0))["param"] == "max_tokens"
    assert error_of(post(served, CHAT, max_completion_tokens=0))["param"] == "max_completion_tokens"
    assert ok(post(served, COMPLETIONS, max_tokens=None))["usage"]["completion_tokens"] == 16
    assert ok(post(served, CHAT, max_tokens=None))["usage"]["total_tokens"] == CONTEXT
    assert ok(post(served, CHAT, max_tokens=9, max_completion_tokens=4))["usage"]["completion_tokens"] == 4


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_va07_va09_a_prompt_over_the_context(served: Served, route: str, streamed: bool) -> None:
    text = "la " * 2 * CONTEXT
    body: Body = {"prompt": text} if route == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    error = error_of(served.http.post(route, json={**body, "stream": streamed}))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if route == COMPLETIONS else "messages")
    assert str(CONTEXT) in error["message"] and "-" not in error["message"].replace("--", "")
    assert len(error["message"]) < 300


def test_va09_healthy_streams_go_on(served: Served) -> None:
    served.engine.step = 0.005
    served.says("la ", eos=False)
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(joined(stream(served, CHAT, max_tokens=50))[0]))
    thread.start()
    served.engine.wait_for(Add)
    for _ in range(5):
        error_of(post(served, COMPLETIONS, prompt=[5] * 2 * CONTEXT))
    thread.join()
    assert answers and answers[0].startswith("la la")


def test_va13_one_prompt_too_many_refuses_all(served: Served) -> None:
    served.says("a")
    error_of(post(served, COMPLETIONS, prompt=["a", "la " * 2 * CONTEXT, "b"]))
    assert not served.engine.of_kind(Add)


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 0},
        {"temperature": 1, "top_p": 0},
        {"top_k": 0},
        {"top_k": -1},
        {"min_p": 0},
    ],
)
def test_va15_neutral_sampling_values(served: Served, route: str, fields: Body) -> None:
    served.says("a")
    ok(post(served, route, **fields))
    sampling = served.engine.of_kind(Add)[0].requests[0].sampling
    assert all(getattr(sampling, name) == value for name, value in fields.items())


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b"true", b"null", b"123", b'"x"', b"", b"{", b"[" * 10_000, b'{"a":' * 10_000),
        *(b'{"model":"tiny","model":"tiny"}', b'{"temperature":NaN}', b'{"temperature":-Infinity}'),
        *(
            b"\xff\xfe{}",
            b'{"user":"\\ud800"}',
            b'{"n":1' + b"0" * 5000 + b"}",
            b'{"top_p":1' + b"0" * 400 + b"}",
        ),
    ],
    ids=lambda body: body[:12],
)
def test_va16_bodies_that_are_not_a_request(served: Served, route: str, body: bytes) -> None:
    begin = time.monotonic()
    error = error_of(served.http.post(route, content=body))
    assert time.monotonic() - begin < 1
    assert len(error["message"]) < 300


@BOTH
@pytest.mark.parametrize("number", [10**300, 1e300, -(10**41)])
def test_va16_numbers_of_many_digits_are_not_echoed(served: Served, route: str, number: float) -> None:
    for field in ("n", "priority", "min_tokens"):
        assert len(error_of(post(served, route, **{field: number}))["message"]) < 150


@BOTH
@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("application/json; charset=UTF-8", 200),
        ("text/plain", 415),
        ("application/json; charset=utf-16", 415),
        ("multipart/form-data; boundary=x", 415),
        ("ÿ".encode("latin-1"), 415),
    ],
)
def test_va17_content_types(served: Served, route: str, content_type: Any, status: int) -> None:
    served.says("a")
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = served.http.post(route, content=json.dumps(base(route)).encode(), headers=headers)
    assert response.status_code == status, response.text
    if status != 200:
        error_of(response, status)


def turns(*roles: str) -> list[Body]:
    return [{"role": role, "content": "x"} for role in roles]


@pytest.mark.parametrize("roles", [("user", "user"), ("assistant", "user"), ("tool",)])
def test_va21_a_template_that_refuses(served_2: Served, roles: tuple[str, ...]) -> None:
    error = error_of(post(served_2, CHAT, messages=turns(*roles)))
    assert error["param"] == "messages" and "alternate" in error["message"]


@pytest.mark.parametrize("roles", [("system", "user"), ("user", "assistant"), ("user",)])
def test_va21_turns_that_the_template_takes(served_2: Served, roles: tuple[str, ...]) -> None:
    served_2.says("yes")
    assert plain(served_2, CHAT, messages=turns(*roles))[0] == "yes"


def test_va22_no_system_role(llama_2: Any, checkpoints: Any, tmp_path: Any) -> None:
    template = tmp_path / "no_system.jinja"
    template.write_text("{{ raise_exception('System role not supported') if messages[0].role == 'system' }}")
    tokenizer = type(llama_2).load(checkpoints["tiny-llama-2"], template)
    with serve(tokenizer, 2) as served:
        error = error_of(post(served, CHAT, messages=turns("system", "user")))
    assert error["param"] == "messages" and "System role not supported" in error["message"]


def test_va24_equal_request_ids_of_clients(served: Served) -> None:
    served.engine.step = 0.01
    served.says("la ", eos=False)
    responses: list[httpx.Response] = []

    def ask() -> None:
        headers = {"X-Request-Id": "same"}
        responses.append(served.http.post(CHAT, json={"messages": USER, "max_tokens": 20}, headers=headers))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [response.status_code for response in responses] == [200, 200]
    assert all(response.headers["x-request-id"] == "same" for response in responses)
    assert responses[0].json()["id"] != responses[1].json()["id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 100_000}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"n": 129}, "n"),
        ({"n": 100_000}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 4, "n": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 1000, "n": 128}, "prompt"),
    ],
)
def test_va25_what_a_request_may_ask_for_is_bounded(served: Served, fields: Body, param: str) -> None:
    assert error_of(post(served, COMPLETIONS, **fields))["param"] == param
    assert not served.engine.of_kind(Add)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_errors_name_the_field(served: Served, fields: Body, param: str) -> None:
    error = error_of(post(served, COMPLETIONS, **fields))
    assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        ([1], "messages"),
        ([{}], "messages"),
        ([{"role": 1, "content": "x"}], "messages"),
        ([{"role": "narrator", "content": "x"}], "messages"),
        ([{"role": "assistant", "content": "x", "reasoning": 5}], "messages"),
        ([{"role": "user", "content": 5}], "messages"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages"),
    ],
)
def test_messages_that_cannot_be(served: Served, messages: Any, param: str) -> None:
    assert error_of(post(served, CHAT, messages=messages))["param"] == param


@BOTH
@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("suffix", "x", None),
        ("prompt_embeds", "x", None),
        ("use_beam_search", True, False),
        ("lora_request", {"name": "x"}, None),
        ("audio", {"voice": "x"}, None),
        ("modalities", ["text", "audio"], ["text"]),
        ("chat_template", "{{ messages }}", None),
    ],
)
def test_lp15_what_is_not_done_yet_is_refused_by_name(
    served: Served, route: str, field: str, value: Any, neutral: Any
) -> None:
    served.says("a")
    error = error_of(post(served, route, **{field: value}))
    assert error["param"] == field and error["code"] == "unsupported_parameter"
    assert f"{field} is not supported yet" in error["message"]
    ok(post(served, route, **{field: neutral}))
    ok(post(served, route, **{field: None}))


def test_unknown_fields_are_logged_once_a_route(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parse, "_reported", set())
    monkeypatch.setattr(parse, "MAX_REPORTED", 3)
    served.says("a")
    for _ in range(2):
        ok(post(served, CHAT, frobnicate=1, user="me"))
        ok(post(served, COMPLETIONS, frobnicate=1))
        ok(served.http.post(f"{CHAT}/", json=base(CHAT) | {"frobnicate": 1}))
    for number in range(5):
        ok(post(served, CHAT, **{f"made_up_{number}": 1}))
    assert [record.getMessage() for record in caplog.records if "unknown" in record.msg] == [
        f"{CHAT}: unknown request field ignored: 'frobnicate'",
        f"{COMPLETIONS}: unknown request field ignored: 'frobnicate'",
        f"{CHAT}: unknown request field ignored: 'made_up_0'",
        "3 unknown request fields were ignored; no more of them will be told",
    ]


def test_defaults_of_the_model_and_of_the_client(llama_3: Any) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 5}
    with serve(llama_3, 518, defaults=defaults) as served:
        served.says("a")

        def sampling(**fields: Any) -> tuple[float, float, int]:
            served.engine.received.clear()
            ok(post(served, CHAT, **fields))
            used = served.engine.of_kind(Add)[0].requests[0].sampling
            return used.temperature, used.top_p, used.top_k

        assert sampling() == sampling(temperature=None) == (0.6, 0.9, 5)
        assert sampling(temperature=0, top_k=0) == (0.0, 0.9, 0)


# ------------------------------------------------------------------ routes


def test_the_official_client_reads_everything(served: Served) -> None:
    served.says("Hello there, friend.")
    client = served.openai
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in chat.choices] == ["Hello there, friend."] * 2
    text = client.completions.create(model=MODEL, prompt=[[5, 6], [7]], logprobs=2, max_tokens=40)
    assert [choice.text for choice in text.choices] == ["Hello there, friend."] * 2
    with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "x"}]) as helper:
        assert helper.get_final_completion().choices[0].message.content == "Hello there, friend."
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_the_four_forms_of_prompts(served: Served) -> None:
    served.says("a")
    ids = served.tokenizer.encode("Hello")
    for prompt, count in (("Hello", 1), (["Hello", "Hello"], 2), (ids, 1), ([ids, ids], 2)):
        answer = ok(post(served, COMPLETIONS, prompt=prompt))
        assert len(answer["choices"]) == count
        assert answer["usage"]["prompt_tokens"] == count * len(ids)
    sent = [request.prompt_token_ids for add in served.engine.of_kind(Add) for request in add.requests]
    assert sent == [ids] * 6


def test_absent_beats_null(served: Served) -> None:
    served.says("Hi")
    answer = ok(post(served, CHAT))
    assert answer["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
    answer = ok(post(served, COMPLETIONS))
    assert answer["choices"][0] == {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}


def test_continuing_the_final_message(served: Served) -> None:
    served.says("!")
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    ok(post(served, CHAT, messages=messages, continue_final_message=True, add_generation_prompt=False))
    prompt = served.engine.of_kind(Add)[0].requests[0].prompt_token_ids
    assert served.tokenizer.decode(prompt).endswith("Once upon")


def test_tokenize_and_back(served: Served) -> None:
    ids = served.tokenizer.encode("Hello 北")
    answer = ok(served.http.post("/tokenize", json={"prompt": "Hello 北", "return_token_strs": True}))
    assert answer.pop("token_strs")[0] == "<|begin_of_text|>"
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
    bare = ok(served.http.post("/tokenize", json={"prompt": "Hello 北", "add_special_tokens": False}))
    assert bare["tokens"] == ids[1:]
    assert ok(served.http.post("/detokenize", json={"tokens": ids[1:]})) == {"prompt": "Hello 北"}
    chat = ok(served.http.post("/tokenize", json={"messages": USER, "model": MODEL}))["tokens"]
    assert chat == served.tokenizer.encode_chat(USER)
    for body in ({}, {"prompt": "a", "messages": USER}):
        error_of(served.http.post("/tokenize", json=body))
    assert error_of(served.http.post("/detokenize", json={"tokens": [10**6]}))["param"] == "tokens"


def test_operations(served: Served) -> None:
    assert served.http.get("/health").status_code == served.http.get("/ping").status_code == 200
    assert ok(served.http.get("/version")).keys() == {"version"}
    metrics = served.http.get("/metrics")
    assert metrics.status_code == 200 and metrics.headers["content-type"].startswith("text/plain")
    assert ok(served.http.get("/load")) == {"server_load": 0}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/health", 405),
        ("GET", "/schema", 404),
    ],
)
def test_errors_of_routing(served: Served, method: str, path: str, status: int) -> None:
    response = served.http.request(method, path, headers={"X-Request-Id": "mine"})
    error_of(response, status)
    assert response.headers["x-request-id"] == "mine"


@BOTH
def test_a_body_over_the_limit(served: Served, route: str) -> None:
    error = error_of(post(served, route, user="x" * 1_100_000), 413)
    assert error["code"] == "request_too_large" and "1000000 bytes" in error["message"]

    def pieces() -> Iterator[bytes]:  # no Content-Length
        yield b'{"user":"'
        for _ in range(110):
            yield b"x" * 10_000
        yield b'"}'

    with contextlib.suppress(httpx.WriteError):  # the server may close before it has read it all
        error_of(served.http.post(route, content=pieces()), 413)


def test_an_unknown_model(served: Served) -> None:
    error = error_of(post(served, CHAT, model="x" * 10_000), 404)
    assert error["code"] == "model_not_found" and len(error["message"]) < 300
    for response in (post(served, CHAT, model="x"), served.http.get("/v1/models/x")):
        assert error_of(response, 404)["message"] == f"The model 'x' is not served here; this server has {MODEL!r}."


def test_an_inner_fault_tells_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(served.tokenizer, "encode", fail)
    error = error_of(post(served, COMPLETIONS), 500)
    assert "secret" not in json.dumps(error)
