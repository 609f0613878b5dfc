"""What the kernels of a trace are said to take."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench import kernels
from bench.kernels import kernel_runs, kernel_seconds
from bench.step import added_seconds


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two kernels of which the second began before the first had ended, one more, and what is no kernel."""

    def event(name: str, start: int, dur: int, thread: int, **args: str) -> dict[str, object]:
        return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start, "dur": dur, "args": args}

    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "Stream #17(Compute)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "XLA Ops"}},
        event("attend", 130, 5, 1, kernel_details="regs:32 grid:7,1,1 block:128,1,1"),
        event("multiply", 100, 10, 1, kernel_details="regs:255 grid:32,4,1 block:128,1,1"),
        event("norm", 102, 14, 1),
        event("custom call", 90, 100, 2),
    ]
    (tmp_path / "host.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return tmp_path


def test_kernels_of_a_trace(trace: Path):
    assert [(run.name, run.grid) for run in kernel_runs(trace)] == [
        ("multiply", "32,4,1"),
        ("norm", ""),
        ("attend", "7,1,1"),
    ]


def test_kernels_that_overlap_count_once(trace: Path, monkeypatch: pytest.MonkeyPatch):
    assert kernel_seconds(trace) == pytest.approx({"multiply": 10e-6, "norm": 6e-6, "attend": 5e-6})
    ended = [("in it", 3, 4), ("in it, too", 5, 6), ("long", 2, 8), ("late", 7, 9), ("apart", 12, 13)]
    runs = [kernels.KernelRun(start, end, name, "") for name, start, end in ended]
    monkeypatch.setattr(kernels, "kernel_runs", lambda directory: runs)
    assert kernel_seconds(trace) == {"in it": 1, "in it, too": 1, "long": 4, "late": 1, "apart": 1}


def test_a_kernel_adds_what_it_ends_after_the_one_in_front(trace: Path):
    added = added_seconds(kernel_runs(trace))
    assert {name: pytest.approx(each) for name, each in added.items()} == {
        "norm  after multiply": [6e-6],
        "attend 7,1,1 after norm": [19e-6],
    }
