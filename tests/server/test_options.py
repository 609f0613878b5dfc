"""Penalties, biases, allowed ids, bad words and min_tokens over HTTP: what the engine gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.engine.messages import Add
from tests.server.conftest import Served
from tests.server.test_protocol import BOTH, error_of, ok, post

ACCEPTED: dict[str, tuple[Any, Any]] = {
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (-2, -2.0),
    "repetition_penalty": (1.1, 1.1),
    "logit_bias": ({"5": 1, "0": -100}, {5: 1.0, 0: -100.0}),
    "allowed_token_ids": ([1, 2], (1, 2)),
    "bad_words": (["bad"], ("bad",)),
    "min_tokens": (3, 3),
}


@BOTH
def test_options_reach_the_engine(served: Served, route: str) -> None:
    served.says("abcdef")
    ok(post(served, route, max_tokens=8, **{name: sent for name, (sent, _) in ACCEPTED.items()}))
    sampling = served.engine.of_kind(Add)[-1].requests[0].sampling
    assert {name: getattr(sampling, name) for name in ACCEPTED} == {name: got for name, (_, got) in ACCEPTED.items()}
    texts = {served.tokenizer.decode(ids) for ids in sampling.bad_words_token_ids}
    assert {text.strip() for text in texts} == {"bad"} and len(sampling.bad_words_token_ids) == 2


@BOTH
@pytest.mark.parametrize("value", ["null", "neutral"])
def test_neutral_options_cost_nothing(served: Served, route: str, value: str) -> None:
    served.says("a")
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "bad_words": [],
    }
    options = dict.fromkeys(ACCEPTED) if value == "null" else {**neutral, "min_tokens": 0, "allowed_token_ids": None}
    ok(post(served, route, **options))
    assert not served.engine.of_kind(Add)[-1].requests[0].sampling.has_options


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("logit_bias", bad)
            for bad in ({"9000000": -100}, {"-1": 1}, {"abc": 1}, {"5": 1000}, {"5": -101}, [], [[5, 1]])
        ),
        *(
            ("logit_bias", bad)
            for bad in ({"9" * 5000: 1}, {"5": None}, {"5": "1"}, {str(i): 1 for i in range(1025)}, 3)
        ),
        *(("presence_penalty", bad) for bad in (2.1, -2.1, "1", [1])),
        *(("frequency_penalty", bad) for bad in (2.1, -2.1, True)),
        *(("repetition_penalty", bad) for bad in (0, -1, 1e9)),
        *(("allowed_token_ids", bad) for bad in ([], [-1], [9000000], [1.5], 3)),
        *(("bad_words", bad) for bad in ([""], [3], "x", ["x" * 300], ["x"] * 65)),
        *(("min_tokens", bad) for bad in (-1, 1.5, 9)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_va02_options_that_cannot_be(served: Served, route: str, field: str, value: Any) -> None:
    """The engine never hears of them."""
    error = error_of(post(served, route, max_tokens=8, **{field: value}))
    assert error["param"] == field and field in error["message"]
    assert not served.engine.of_kind(Add)
