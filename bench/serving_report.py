"""What the records of a load say: latencies as vLLM's benchmark defines them, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.serving_client import Record

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "max_itl": "largest ITL", "e2e": "end to end"}
PERCENTILES = (50, 90, 99)


def latencies(record: Record) -> dict[str, float]:
    """Seconds of one complete answer; tpot and max_itl only where there is a second token.

    ttft: from sending to the first event; tpot: from the first event to the last, over the tokens after the first;
    max_itl: the longest time between two events; e2e: from sending to the last event.
    """
    first, last = record.times[0], record.times[-1]
    found = {"ttft": first - record.sent, "e2e": last - record.sent}
    if record.output_tokens > 1:
        found["tpot"] = (last - first) / (record.output_tokens - 1)
    if len(record.times) > 1:
        found["max_itl"] = float(np.diff(record.times).max())
    return found


def summarise(records: Sequence[Record], slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Rates over the time from the first request to the last event, and percentiles of latencies in seconds.

    Requests that failed count in ``failed`` alone. ``slo``: bounds in seconds on names of ``latencies``; goodput is the
    requests a second that keep them all.
    """
    complete = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    summary: dict[str, Any] = {"requests": len(records), "failed": len(errors)}
    if errors:
        summary["first_error"] = errors[0]
    if not complete:
        return summary
    each = [latencies(record) for record in complete]
    seconds = max(r.times[-1] for r in complete) - min(r.sent for r in records)
    tokens_in, tokens_out = (sum(getattr(r, f"{way}_tokens") for r in complete) for way in ("input", "output"))
    summary |= {
        "seconds": seconds,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "events": sum(len(r.times) for r in complete),
        "requests_s": len(complete) / seconds,
        "output_tokens_s": tokens_out / seconds,
        "total_tokens_s": (tokens_in + tokens_out) / seconds,
    }
    values = {name: [one[name] for one in each if name in one] for name in LATENCIES if name != "itl"}
    values["itl"] = np.concatenate([np.diff(r.times) for r in complete]).tolist()
    for name, sample in values.items():
        if sample:
            summary[name] = {"mean": float(np.mean(sample))}
            summary[name] |= {f"p{p}": float(np.percentile(sample, p)) for p in PERCENTILES}
    if slo:
        kept = sum(all(one.get(name, 0.0) <= bound for name, bound in slo.items()) for one in each)
        summary["goodput_s"] = kept / seconds
    return summary


def table(loads: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a column a load, a line a figure."""
    lines = [["", *(load["load"] for load in loads)], ["---"] * (len(loads) + 1)]
    lines.append(["requests (failed)", *(f"{load['requests']} ({load['failed']})" for load in loads)])
    for name, title, digits in (
        ("seconds", "seconds", 2),
        ("requests_s", "requests/s", 2),
        ("output_tokens_s", "output tokens/s", 0),
        ("total_tokens_s", "tokens/s, in and out", 0),
        ("goodput_s", "goodput, requests/s", 2),
    ):
        if any(name in load for load in loads):
            lines.append([title, *(f"{load[name]:,.{digits}f}" if name in load else "" for load in loads)])
    for name, title in LATENCIES.items():
        lines.append([f"{title} p50 / p90 / p99 ms", *(_percentiles(load.get(name)) for load in loads)])
    shares = [" ".join(f"{share:.0%}" for share in load["client_cpu"]) for load in loads]
    lines.append(["CPU of each client", *shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percentiles(found: Mapping[str, float] | None) -> str:
    return " / ".join(f"{found[f'p{p}'] * 1000:.1f}" for p in PERCENTILES) if found else ""
