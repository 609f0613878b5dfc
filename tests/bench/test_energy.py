"""What is counted, and for what, with a meter of a fixed power in the driver's place."""

from __future__ import annotations

import time
from functools import partial

import pytest

from bench import energy, kernels


class OneHundredWatts:
    def joules(self) -> float:
        return 100.0 * time.perf_counter()

    def megahertz(self) -> float:
        return 1980.0


def test_energy_is_power_times_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(energy, "PRODUCTS", {"o": (64, 64), "gate, up": (64, 192)})
    for name, value in {"TOKENS": 20, "LAYERS": 2, "WARM_UP_SECONDS": 0.0, "SECONDS": 0.02}.items():
        monkeypatch.setattr(energy, name, value)
    found = energy.table(OneHundredWatts(), 3, "reference", kernels.random_array)
    assert list(found) == ["attention", "reading its keys and values", "o", "gate, up"]
    for one in found.values():
        assert one.watts == pytest.approx(100, rel=0.01)
        assert one.millijoules == pytest.approx(one.microseconds / 10, rel=0.01)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(found) and all(line.endswith("1980") for line in lines[1:])


def test_calls_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(energy, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(energy, "SECONDS", 0.05)
    slow = partial(time.sleep, 0.002)
    assert energy.measure(OneHundredWatts(), slow, calls=4).microseconds == pytest.approx(500, rel=0.5)
