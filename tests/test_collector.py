"""The garbage collector does not stop steps."""

from __future__ import annotations

import gc
import sys

import pytest

from jaxserve import collector
from jaxserve.request import SamplingParams

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="old objects are looked at a few at a time")


def test_old_objects_are_left_alone_and_then_looked_at_again():
    before = gc.get_threshold()
    with pytest.raises(KeyError), collector.only_young():
        assert gc.get_threshold() == (*before[:2], collector.NEVER)
        with collector.only_young():
            pass
        assert gc.get_threshold()[2] == collector.NEVER
        raise KeyError
    assert gc.get_threshold() == before


def test_a_call_of_the_engine_is_not_stopped(llm, monkeypatch: pytest.MonkeyPatch):
    model = llm("tiny-llama-3.1")
    step, seen = model.engine.step, set()

    def look():
        seen.add(gc.get_threshold()[2])
        return step()

    monkeypatch.setattr(model.engine, "step", look)
    model.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert seen == {collector.NEVER} and gc.get_threshold()[2] != collector.NEVER
