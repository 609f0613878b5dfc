"""A line for the log every few seconds in which the engine worked."""

from __future__ import annotations

from jaxserve.engine.events import StepEvent

PERIOD_SECONDS = 10.0


class Traffic:
    """What the steps since the last line did. Times are ``time.monotonic()`` seconds."""

    def __init__(self, now: float) -> None:
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._steps = self._prompt = self._generated = self._queried = self._cached = self._preempted = 0

    def step(self, event: StepEvent, generated: int) -> None:
        """``generated`` tokens came of a step."""
        self._steps += 1
        self._prompt += sum(event.prefill_tokens)
        self._generated += generated
        self._queried += event.queried_tokens
        self._cached += event.cached_tokens
        self._preempted += len(event.preempted)

    def line(self, now: float, running: int, waiting: int, kv_usage: float) -> str | None:
        """The line, if it is time for it and there is something to say; it begins a new period."""
        seconds = now - self._since
        if seconds < PERIOD_SECONDS:
            return None
        text = None
        if self._steps:
            text = (
                f"{self._prompt / seconds:.1f} prompt tokens/s, {self._generated / seconds:.1f} generated tokens/s;"
                f" {running} running, {waiting} waiting; KV cache {kv_usage:.1%} used"
            )
            if self._queried:
                text += f", {self._cached / self._queried:.1%} of new prompts' tokens found there"
            if self._preempted:
                text += f"; {self._preempted} preempted"
        self._begin(now)
        return text
