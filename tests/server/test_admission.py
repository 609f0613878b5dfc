"""The door under load: who is refused, what they are told, and deadlines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.engine.admission import Overloaded, QueueLimits
from jaxserve.engine.messages import Abort, Add, Load, Refused
from jaxserve.request import EngineRequest, SamplingParams
from jaxserve.tokenizer import Tokenizer
from tests.server.conftest import Served, serve, wait_until

ROUTES = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


@pytest.fixture(scope="module")
def limited(llama_3: Tokenizer) -> Iterator[Served]:
    """A server that lets four requests or 200 tokens wait, and nobody longer than 100 s."""
    eos = llama_3.encode("<|eot_id|>", False)[0]
    limits = {"max_num_queued_reqs": 4, "max_num_queued_tokens": 200, "max_queue_wait": 100.0}
    with serve(llama_3, eos, **limits, request_timeout=30.0) as served:
        yield served


def tell(served: Served, waiting: int, tokens: int = 0, seconds: float = 0.0) -> None:
    """The engine tells this of its queue, and the server has heard it."""
    served.engine.queue = (waiting, tokens, seconds)
    wait_until(lambda: heard(served))


def heard(served: Served) -> bool:
    load = served.client._load
    return (load.waiting, load.waiting_tokens, load.wait_seconds) == served.engine.queue


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_full_queue_is_answered_429_before_any_event(limited: Served, route: str, stream: bool) -> None:
    limited.engine.received.clear()
    tell(limited, waiting=4, seconds=17.2)
    answer = limited.http.post(route, json={**ROUTES[route], "stream": stream})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "18"
    error = answer.json()["error"]
    assert error["type"] == "rate_limit_error" and error["code"] == "overloaded" and "4 requests" in error["message"]
    assert limited.engine.wait_for(Refused).reason == "queued_reqs" and not limited.engine.of_kind(Add)
    tell(limited, waiting=3)
    assert limited.http.post(route, json=ROUTES[route]).status_code == 200


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses", "embeddings", "score", "score/"])
def test_a_refused_body_is_not_even_parsed(limited: Served, route: str) -> None:
    tell(limited, waiting=4)
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
    refused = limited.http.post(f"/v1/{route}", content=b"no JSON", headers=headers)
    assert refused.status_code == 429 and refused.headers["x-request-id"] == "mine"
    tell(limited, waiting=0)
    assert limited.http.post(f"/v1/{route}", content=b"no JSON", headers=headers).status_code == 400


def test_what_needs_no_place_in_the_queue_is_not_refused(limited: Served) -> None:
    tell(limited, waiting=4)
    assert limited.http.get("/v1/models").status_code == limited.http.get("/metrics").status_code == 200
    assert limited.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert limited.http.get("/v1/completions").status_code == 405


def test_who_has_no_key_is_not_told_that_the_server_is_full(llama_3: Tokenizer) -> None:
    with serve(llama_3, 518, root_path="/llm", api_key=("k",), max_num_queued_reqs=0) as served:
        assert served.http.post("/v1/completions", json={}).status_code == 401
        refused = served.http.post("/v1/completions", json={}, headers={"Authorization": "Bearer k"})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"


def test_waiting_tokens_are_limited_too(limited: Served) -> None:
    tell(limited, waiting=1, tokens=200, seconds=3.0)
    answer = limited.http.post("/v1/completions", json=ROUTES["/v1/completions"])
    assert answer.status_code == 429 and "200 tokens" in answer.json()["error"]["message"]


def test_the_expected_wait_is_limited_too(limited: Served) -> None:
    limited.engine.received.clear()
    tell(limited, waiting=1, seconds=100.4)
    answer = limited.http.post("/v1/completions", json=ROUTES["/v1/completions"])
    assert answer.status_code == 429 and "wait about 100.4 s" in answer.json()["error"]["message"]
    assert limited.engine.wait_for(Refused).reason == "queue_wait"
    tell(limited, waiting=0, seconds=100.4)
    assert limited.http.post("/v1/completions", json=ROUTES["/v1/completions"]).status_code == 200, "nobody waits"


def test_requests_that_the_engine_has_not_heard_of_make_the_wait_longer() -> None:
    limits = QueueLimits(max_wait=9.0)
    load = Load(1, 10, wait_seconds=5.0, free_slots=0, received=7, request_seconds=2.0)
    one = EngineRequest(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=5, seed=0)
    sent = [one] * 3
    limits.check(load, sent[:2])
    with pytest.raises(Overloaded, match=r"about 11\.0 s") as refused:
        limits.check(load, sent)
    assert refused.value.retry_after == 11


def check_let_in(served: Served, count: int) -> None:
    """So many of eight calls are let in while the engine says nothing of its queue; the others are answered 429."""
    for waiting in (1, 0):
        tell(served, waiting)
    served.engine.queue = None  # from now on it says nothing
    served.engine.hold.set()
    try:
        with ThreadPoolExecutor(8) as pool:
            body = {"prompt": [5] * 60, "max_tokens": 2}
            answers = [pool.submit(served.http.post, "/v1/completions", json=body) for _ in range(8)]
            wait_until(lambda: sum(answer.done() for answer in answers) == 8 - count)
            served.engine.hold.clear()
        statuses = [answer.result().status_code for answer in answers]
    finally:
        served.engine.hold.clear()
    assert sorted(statuses) == [200] * count + [429] * (8 - count), "however close together they come"


def test_requests_that_the_engine_has_not_heard_of_count(limited: Served) -> None:
    check_let_in(limited, 4)


def test_several_processes_let_in_no_more_than_one_would(llama_3: Tokenizer) -> None:
    """None of them knows of what the others let in since the engine's last word."""
    with serve(llama_3, 518, max_num_queued_reqs=4, api_server_count=2) as served:
        check_let_in(served, 2)
        tell(served, waiting=3)
        assert served.http.post("/v1/completions", json=ROUTES["/v1/completions"]).status_code == 200


def test_a_request_that_would_wait_past_its_deadline_is_refused(limited: Served) -> None:
    tell(limited, waiting=2, seconds=5.0)
    body = ROUTES["/v1/completions"]
    refused = limited.http.post("/v1/completions", json={**body, "deadline_ms": 4000})
    assert refused.status_code == 429 and "deadline" in refused.json()["error"]["message"]
    assert limited.http.post("/v1/completions", json={**body, "deadline_ms": 60_000}).status_code == 200
    assert limited.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_deadline_priority_and_salt_reach_the_engine(limited: Served, route: str) -> None:
    tell(limited, waiting=0)
    limited.engine.received.clear()
    fields = {"priority": 7, "cache_salt": "mine", "deadline_ms": 5000, "n": 2}
    now = time.monotonic()
    assert limited.http.post(route, json={**ROUTES[route], **fields}).status_code == 200
    first, second = limited.engine.wait_for(Add).requests
    assert first.group == second.group and first.request_id.startswith(first.group)
    assert (first.priority, first.cache_salt) == (7, "mine")
    assert first.deadline is not None and 4 < first.deadline - now < 6
    limited.engine.received.clear()
    limited.http.post(route, json=ROUTES[route])
    default = limited.engine.wait_for(Add).requests[0].deadline
    assert default is not None and 29 < default - time.monotonic() <= 30, "the server's own timeout"
    assert not limited.engine.of_kind(Abort)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1001),
        ("priority", -(10**400)),
        ("priority", "high"),
        ("deadline_ms", 0),
        ("deadline_ms", 10**400),
        ("cache_salt", 5),
    ],
)
def test_what_cannot_be_is_refused_by_name(limited: Served, field: str, value: object) -> None:
    tell(limited, waiting=0)
    answer = limited.http.post("/v1/completions", json={"prompt": "x", field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_the_cache_can_be_reset(limited: Served) -> None:
    assert limited.http.post("/reset_prefix_cache").status_code == 200


def test_op06_health_is_fast_while_the_engine_is_in_a_long_step(limited: Served) -> None:
    """No sign of life for seconds, as when long prompts are computed."""
    tell(limited, waiting=0)
    limited.engine.script = lambda request: (time.sleep(2.5) or limited.eos_id for _ in range(1))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(limited.http.post, "/v1/completions", json={"prompt": "long", "max_tokens": 1})
        limited.engine.wait_for(Add)
        polls = 0
        while not answer.done():
            start = time.monotonic()
            assert limited.http.get("/health").status_code == 200
            assert time.monotonic() - start < 1
            polls += 1
            time.sleep(0.2)
    assert answer.result().status_code == 200 and polls > 5


def test_the_last_steps_are_shown_only_where_that_was_asked_for(limited: Served, llama_3: Tokenizer) -> None:
    assert limited.http.get("/debug/steps").status_code == 404
    with serve(llama_3, limited.eos_id, enable_debug_steps=True) as other:
        assert other.http.get("/debug/steps").content == b"# debug_steps\n"
