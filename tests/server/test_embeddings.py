"""The routes /v1/embeddings and /v1/score. The scripted engine's vectors have an angle of a tenth of the tokens."""

from __future__ import annotations

import base64
import math
import struct
import time
from typing import Any

import openai
import pytest

from jaxserve.engine.messages import Abort, Add
from jaxserve.tokenizer import Tokenizer
from tests.server.calls import Body, error_of, ok
from tests.server.conftest import MODEL, Served, serve, wait_until

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"


def vector_of(num_tokens: int) -> list[float]:
    return [math.cos(num_tokens / 10), math.sin(num_tokens / 10), 0.0, 0.0]


def embed(served: Served, value: Any, **fields: Any) -> Body:
    return ok(served.http.post(EMBEDDINGS, json={"model": MODEL, "input": value, **fields}))


@pytest.mark.parametrize("form", ["a text", "texts", "ids", "lists of ids"])
def test_the_four_forms_of_an_input(served: Served, form: str) -> None:
    texts = ["Hello"] if form in ("a text", "ids") else ["Hello", "Hello there, you"]
    ids = [served.tokenizer.encode(text) for text in texts]
    value: Any = {"a text": texts[0], "texts": texts, "ids": ids[0], "lists of ids": ids}[form]
    answer = embed(served, value)
    assert answer.keys() == {"object", "data", "model", "usage"} and answer["object"] == "list"
    total = sum(map(len, ids))
    assert answer["model"] == MODEL and answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
    for index, (item, tokens) in enumerate(zip(answer["data"], ids, strict=True)):
        assert item.keys() == {"object", "index", "embedding"}
        assert item["object"] == "embedding" and item["index"] == index
        assert item["embedding"] == pytest.approx(vector_of(len(tokens)))
    requests = served.engine.of_kind(Add)[-1].requests
    assert [r.prompt_token_ids for r in requests] == ids
    assert {(r.max_tokens, r.pooling) for r in requests} == {(0, "last")}


def test_base64_and_the_official_client(served: Served) -> None:
    tokens = len(served.tokenizer.encode("Hello"))
    raw = base64.b64decode(embed(served, "Hello", encoding_format="base64")["data"][0]["embedding"])
    assert struct.unpack("<4f", raw) == pytest.approx(vector_of(tokens))
    strict = served.openai.embeddings.create(model=MODEL, input="Hello", dimensions=4, encoding_format="float")
    assert strict.data[0].embedding == pytest.approx(vector_of(tokens))
    # By itself it asks for base64, which its own types do not know.
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        response = client.embeddings.create(model=MODEL, input=["Hello", "you"])
    assert response.data[0].embedding == pytest.approx(vector_of(tokens))
    assert response.usage.total_tokens > tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": [7] * 257}, "input"),
        ({"input": [[7]] * 2049}, "input"),
        ({"dimensions": 3}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 1001}, "priority"),
        ({"model": "other"}, "model"),
    ],
)
def test_faults_name_the_field(served: Served, fields: Body, param: str) -> None:
    response = served.http.post(EMBEDDINGS, json={"input": "Hello", **fields})
    assert error_of(response, 404 if param == "model" else 400)["param"] == param
    assert not served.engine.of_kind(Add)


def test_a_text_may_fill_the_context_and_be_cut_to_it(served: Served) -> None:
    embed(served, [7] * 256)
    assert embed(served, [7] * 500, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == 256
    assert embed(served, [5, 6, 7], truncate_prompt_tokens=2)["usage"]["total_tokens"] == 2


def test_pooling_is_a_flag(llama_3: Tokenizer) -> None:
    with serve(llama_3, 518, pooling="mean") as served:
        embed(served, "Hello", cache_salt="mine", priority=3)
        [request] = served.engine.of_kind(Add)[0].requests
        assert (request.pooling, request.cache_salt, request.priority) == ("mean", "mine", 3)


@pytest.mark.parametrize(
    ("text_1", "text_2", "pairs"),
    [
        ("Hello", "Hello", [(0, 0)]),
        ("Hello", ["Hello", "Hello there, you"], [(0, 0), (0, 1)]),
        (["Hello", "Hello there, you"], ["Hello there, you", "Hello"], [(0, 0), (1, 1)]),
    ],
)
def test_scores_are_cosines(served: Served, text_1: Any, text_2: Any, pairs: list[tuple[int, int]]) -> None:
    answer = ok(served.http.post(SCORE, json={"text_1": text_1, "text_2": text_2}))
    sides = [[text] if isinstance(text, str) else text for text in (text_1, text_2)]
    first, second = ([len(served.tokenizer.encode(text)) for text in side] for side in sides)
    assert answer["object"] == "list" and answer["id"].startswith("score-") and answer["model"] == MODEL
    assert answer["usage"]["total_tokens"] == sum(first) + sum(second)
    assert [item["index"] for item in answer["data"]] == list(range(len(pairs)))
    for item, (one, two) in zip(answer["data"], pairs, strict=True):
        assert item["object"] == "score"
        assert item["score"] == pytest.approx(math.cos((first[one] - second[two]) / 10), abs=1e-6)


@pytest.mark.parametrize(
    ("text_1", "text_2", "param"),
    [
        (["a", "b"], ["c"], "text_2"),
        (["a", "b"], "c", "text_2"),
        ([], [], "text_1"),
        ("a", [], "text_2"),
        ("", "a", "text_1"),
        ("a", [1], "text_2"),
    ],
)
def test_texts_that_cannot_be_scored(served: Served, text_1: Any, text_2: Any, param: str) -> None:
    assert error_of(served.http.post(SCORE, json={"text_1": text_1, "text_2": text_2}))["param"] == param


def test_a_client_that_leaves_aborts_its_embeddings(served: Served) -> None:
    served.engine.hold.set()
    try:
        with pytest.raises(Exception, match="timed out"):
            served.http.post(EMBEDDINGS, json={"input": ["Hello", "you"]}, timeout=0.3)
        wait_until(lambda: served.engine.of_kind(Abort))
    finally:
        served.engine.hold.clear()
    assert len(served.engine.of_kind(Abort)[0].request_ids) == 2


def test_a_deadline_that_passes(llama_3: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(llama_3, 518, request_timeout=5.0) as served:
        before = time.monotonic()
        embed(served, "Hello")
        [request] = served.engine.of_kind(Add)[0].requests
        assert request.deadline is not None and before < request.deadline <= time.monotonic() + 5
