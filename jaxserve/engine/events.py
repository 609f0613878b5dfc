"""One structured record a step: what metrics, notebooks and a crash report are made from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step as it was collected. Times are ``time.monotonic()`` seconds."""

    submitted: float
    collected: float
    decode_requests: tuple[str, ...]
    prefill_requests: tuple[str, ...]
    num_tokens: int
    """Tokens that the step computed …"""
    padded_tokens: int
    """… and the tokens of the bucket that it ran in."""
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    queried_tokens: int
    """Tokens of first admitted requests that looked for cached blocks …"""
    cached_tokens: int
    """… and how many of those they found."""
    num_evicted: int
    """Cached blocks that gave way."""
    finished: tuple[str, ...]
    running: int
    waiting: int
    free_blocks: int

    @property
    def kind(self) -> str:
        """decode, prefill or mixed."""
        if not self.prefill_requests:
            return "decode"
        return "mixed" if self.decode_requests else "prefill"
