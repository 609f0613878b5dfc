"""The line on the traffic."""

from __future__ import annotations

import pytest

from jaxserve.engine.traffic import PERIOD_SECONDS, Traffic
from jaxserve.request import SamplingParams


def test_a_line_says_what_happened_since_the_last(llm, monkeypatch: pytest.MonkeyPatch):
    model = llm("tiny-llama-3.1")
    engine = model.engine
    engine.reset_prefix_cache()
    monkeypatch.setattr(engine, "traffic", Traffic(0.0))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for _ in range(2):
        model.generate(list(range(3, 43)), params)
    assert engine.traffic.line(PERIOD_SECONDS / 2, 0, 0, 0.0) is None, "too early"
    assert engine.traffic.line(PERIOD_SECONDS, 3, 1, 0.25) == (
        "4.8 prompt tokens/s, 1.0 generated tokens/s; 3 running, 1 waiting; KV cache 25.0% used,"
        " 40.0% of new prompts' tokens found there"
    )
    assert engine.traffic.line(2 * PERIOD_SECONDS, 0, 0, 0.0) is None, "nothing happened"
