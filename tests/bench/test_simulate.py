"""The simulation: the real scheduler against costs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench import simulate
from bench.simulate import Arrival, log_normal_trace, read_trace
from tests.conftest import ROOT


def run(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "bench/simulate.py"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_trace_is_replayed_and_shared_prefixes_are_found(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    item = {"prompt_len": 320, "output_len": 8, "prefix_id": 1, "prefix_len": 160}
    lines = [json.dumps({**item, "arrival": index * 0.5}) for index in range(20)]
    trace.write_text("\n".join(lines), encoding="utf-8")
    shown = run("--trace", str(trace))
    assert shown.startswith("20 requests in ")
    assert f"prefix cache: {100 * 19 * 160 / (20 * 320):.1f} % of 6,400 tokens found" in shown
    assert "prefix cache: 0.0 % of 0 tokens" in run("--trace", str(trace), "--no-prefix-caching")


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt_len": 3, "output_len": 1}\n{"arrival": 0}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2: .*prompt_len"):
        read_trace(trace)


def options(*arguments: str):
    return simulate.make_parser().parse_args(arguments)


def test_what_is_measured_follows_from_the_costs() -> None:
    """One request of 100 + 3 tokens: a prompt step, then two that decode."""
    result = simulate.simulate([Arrival(1.0, 100, 3)], options("--depth", "1"))
    costs = simulate.Costs()
    first = costs.step + math.hypot(costs.weights, 128 * costs.token) + 100 * costs.context_token
    decode = costs.step + math.hypot(costs.weights, costs.token)
    assert result.first_token == [pytest.approx(first)] and result.waiting == [0.0]
    assert result.gaps == [pytest.approx(decode + n * costs.context_token) for n in (101, 102)]
    assert (result.output_tokens, result.steps) == (3, 3)


def test_thousands_of_requests_come_to_their_end_under_pressure() -> None:
    trace = list(log_normal_trace(1000, rate=200, seed=1, shared=0.5))
    result = simulate.simulate(trace, options("--blocks", "1500", "--swap-blocks", "1024"))
    assert len(result.first_token) == 1000 and result.output_tokens == sum(item.output_len for item in trace)
    assert result.preempted - result.swapped > 10 and result.swapped > 10 and result.evicted > 1000
    assert result.cached_tokens > 0.1 * result.queried_tokens
    assert result.most_preemptions <= 6


def test_larger_blocks_and_contiguous_allocation_waste_more() -> None:
    shown = run("--waste", "--requests", "200")
    shares = [float(line.split("|")[1].split()[0]) for line in shown.splitlines()[1:]]
    assert len(shares) == 5 and shares == sorted(shares) and shares[0] < 5
