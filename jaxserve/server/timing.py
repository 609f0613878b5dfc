"""Where the time of one call went, from the engine's marks and from our own clock, which is the same one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.engine.messages import TokenOutput
from jaxserve.server.schemas import RequestMetrics


@dataclass(slots=True)
class ChoiceTimes:
    """Marks of one answer, in ``time.monotonic()`` seconds; 0 where there is none yet."""

    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0

    def note(self, output: TokenOutput) -> None:
        """Takes in one output. A stop string ends an answer before the engine can send its last marks."""
        self.num_tokens += len(output.token_ids)
        if output.timings is None:
            self.last_token = time.monotonic()
        else:
            self.scheduled = output.timings.scheduled
            self.first_token = output.timings.first_token
            self.last_token = output.timings.last_token


def request_metrics(answers: Iterable[ChoiceTimes]) -> RequestMetrics | None:
    """The breakdown of a call, or None while it has no token."""
    begun = [times for times in answers if times.first_token]
    if not begun:
        return None
    arrival = min(times.arrival for times in begun)
    scheduled = min(times.scheduled for times in begun)
    first = min(times.first_token for times in begun)
    last = max(times.last_token for times in begun)
    gaps = sum(max(times.num_tokens - 1, 0) for times in begun)
    between = sum(times.last_token - times.first_token for times in begun)
    return RequestMetrics(
        queue_time_ms=_ms(scheduled - arrival),
        prefill_time_ms=_ms(first - scheduled),
        time_to_first_token_ms=_ms(first - arrival),
        decode_time_ms=_ms(last - first),
        mean_itl_ms=_ms(between / gaps if gaps else 0.0),
        tokens_per_second=round(sum(times.num_tokens for times in begun) / max(last - arrival, 1e-6), 3),
    )


def server_timing(metrics: RequestMetrics) -> str:
    """The same as a Server-Timing header, which browsers and proxies show."""
    return (
        f"queue;dur={metrics.queue_time_ms}, prefill;dur={metrics.prefill_time_ms}, decode;dur={metrics.decode_time_ms}"
    )


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)
