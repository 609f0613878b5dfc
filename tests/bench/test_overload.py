"""Ten times what the server can sustain, in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import overload
from bench.serving_client import Record
from tests.server.running import serving


@pytest.mark.slow
def test_a_server_under_ten_times_its_load_goes_on_at_its_pace(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine may be busy with other tests, so nothing is asked of times but their order."""
    flags = ["--input-len", "16", "--output-len", "100", "--vocab-size", "400", "--json", str(tmp_path / "out.json")]
    flags += ["--concurrency", "4", "--rounds", "3", "--search-seconds", "3", "--seconds", "5"]
    with serving(checkpoint("tiny-llama-3.1"), max_num_queued_reqs=8) as server:
        overload.main(["--url", server.url, *flags])
    found = json.loads((tmp_path / "out.json").read_text())
    base, over = found["sustainable"], found["overload"]
    assert over["refused"] > 0 and not over["failed"] and not over["unexplained"]
    assert over["goodput_s"] > 0.5 * base["goodput_s"] and over["refusal"]["p50"] < over["ttft"]["p50"]
    assert len(found["rss"]) == 3 and all(map(overload.is_flat, found["rss"].values()))
    out = capsys.readouterr().out
    assert "python " in out and "| parent | " in out and "memory of parent flat" in out


def test_a_refusal_counts_as_a_request_that_waits_for_ever() -> None:
    answered = Record(input_tokens=5, sent=10.0, times=[11.0, 12.0], output_tokens=2, status=200)
    late = Record(input_tokens=5, sent=9.0, times=[11.5], output_tokens=1, status=200)
    refused = Record(input_tokens=5, sent=9.0, ended=9.03, error="HTTP 429: full", status=429, retry_after="7")
    silent = Record(input_tokens=5, sent=9.0, ended=9.01, error="HTTP 429: full", status=429)
    figures = overload.judge([answered, late, refused, silent])
    assert (figures["requests"], figures["failed"], figures["refused"], figures["unexplained"]) == (2, 0, 2, 1)
    assert figures["in_time"] == 0.25 and figures["goodput_s"] == pytest.approx(1 / 3)
    assert figures["refusal"]["p100"] == pytest.approx(0.03) and figures["retry_after"] == ["7"]
    base = overload.judge([answered])
    assert [kept for _, kept in overload.verdicts_on(base, figures).items()] == [False, True, False, True]


def test_the_sustainable_rate_is_the_highest_that_is_kept_up() -> None:
    tried = []

    def measure(rate: float) -> overload.Figures:
        tried.append(rate)
        return {"rate": rate, "in_time": 1.0 if rate <= 6.1 else 0.98}

    assert overload.sustainable(measure, 8.0, 4)["rate"] == 6.0 and tried == [4.0, 6.0, 7.0, 6.5]
    with pytest.raises(SystemExit, match="no rate"):
        overload.sustainable(lambda rate: {"rate": rate, "in_time": 0.5}, 8.0, 3)


def test_memory_is_flat_where_the_end_is_no_higher_than_the_beginning() -> None:
    mib = 2**20
    assert overload.is_flat([100 * mib] * 20 + [900 * mib] * 2 + [107 * mib] * 20), "peaks between do not count"
    assert not overload.is_flat([100 * mib] * 20 + [109 * mib] * 20)
    assert overload.is_flat([1000 * mib] * 20 + [1049 * mib] * 20)
    assert not overload.is_flat([1000 * mib] * 20 + [1051 * mib] * 20)
    with pytest.raises(SystemExit, match="port 1"):
        overload.server_processes(1)
