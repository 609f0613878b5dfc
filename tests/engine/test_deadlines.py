"""Deadlines: who is late, and that those who have ended leave nothing behind."""

from __future__ import annotations

from jaxserve.engine.deadlines import Deadlines


def test_who_is_late_is_told_once_and_in_time() -> None:
    deadlines = Deadlines()
    for name, time in (("b", 2.0), ("a", 1.0), ("c", 3.0), ("early", 0.5)):
        deadlines.add(name, time)
    deadlines.forget("early")
    deadlines.forget("never had one")
    assert deadlines.passed(0.9) == []
    assert deadlines.passed(1.0) == ["a"]
    deadlines.forget("a")
    assert deadlines.passed(1.5) == []
    deadlines.add("d", 1.6)
    assert deadlines.passed(2.5) == ["b", "d"]
    for name in "bd":
        deadlines.forget(name)
    assert deadlines.passed(9.0) == ["c"]


def test_requests_that_ended_in_time_take_no_memory() -> None:
    deadlines = Deadlines()
    for number in range(1000):
        deadlines.add(str(number), 3600.0 + number)
        deadlines.forget(str(number))
    assert len(deadlines) == 0
