"""Counts compilations, so that "none after start" is a figure and not a hope."""

from __future__ import annotations

import logging

import jax

logger = logging.getLogger(__name__)

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Counter:
    def __init__(self) -> None:
        self.serving = False
        self.counts = {"startup": 0, "serving": 0}

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _EVENT:
            return
        self.counts["serving" if self.serving else "startup"] += 1
        if self.serving:
            logger.warning(
                "compiled a program while serving (%.2f s); every shape should be known at start", duration_secs
            )


_counter = _Counter()
jax.monitoring.register_event_duration_secs_listener(_counter)


def freeze() -> None:
    """From now on a compilation is counted, and logged, as one that should not be."""
    _counter.serving = True


def thaw() -> None:
    """Another engine of this process is about to start."""
    _counter.serving = False


def total() -> int:
    """Compilations of this process so far."""
    return sum(_counter.counts.values())


def counts() -> dict[str, int]:
    """Compilations of this process by phase, startup or serving (those read from a cache included)."""
    return dict(_counter.counts)
