"""The rates that a waiting time is estimated from."""

from __future__ import annotations

import pytest

from jaxserve.engine.throughput import WINDOW_SECONDS, Throughput


def test_the_wait_follows_from_what_was_measured():
    throughput = Throughput()
    assert throughput.wait_seconds(5, 1000) == 0.0, "nothing is known yet"
    for second in range(4):
        throughput.step(second, second + 1.0, 300)
    assert throughput.tokens_per_second() == pytest.approx(300)
    throughput.finished(100)
    throughput.finished(200)
    assert throughput.wait_seconds(10, 1500) == pytest.approx((1500 + 10 * 150) / 300)


def test_only_the_last_seconds_count():
    throughput = Throughput()
    throughput.step(0.0, 1.0, 10_000)
    for second in range(1, 30):
        throughput.step(second, second + 1.0, 100)
    assert throughput.tokens_per_second() == pytest.approx(100)
    assert len(throughput._steps) <= WINDOW_SECONDS + 1


def test_idle_time_and_steps_that_overlap_do_not_blur_the_rate():
    throughput = Throughput()
    throughput.step(0.0, 1.0, 100)
    throughput.step(0.5, 2.0, 100)  # submitted while the first one ran
    throughput.step(8.0, 9.0, 100)
    assert throughput.tokens_per_second() == pytest.approx(100)


def test_the_length_of_answers_follows_a_change():
    throughput = Throughput()
    throughput.step(0.0, 1.0, 1)
    for length in [10] * 50 + [500] * 200:
        throughput.finished(length)
    assert throughput.wait_seconds(1, 0) == pytest.approx(500, rel=0.01)
