"""What the engine has been doing lately, and how long a new request would therefore wait."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 10.0
ANSWERS_REMEMBERED = 32
"""The mean length of answers forgets at this pace."""


class Throughput:
    """Tokens a second over the last seconds, and the length of an answer. Times are ``time.monotonic()`` seconds."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, int]] = deque()
        """Beginning, end and tokens of the steps in the window."""
        self._tokens = 0
        self._mean_answer = 0.0
        self._answers = 0

    def step(self, submitted: float, collected: float, tokens: int) -> None:
        self._steps.append((submitted, collected, tokens))
        self._tokens += tokens
        while self._steps[0][1] < collected - WINDOW_SECONDS:
            self._tokens -= self._steps.popleft()[2]

    def finished(self, output_tokens: int) -> None:
        self._answers = min(self._answers + 1, ANSWERS_REMEMBERED)
        self._mean_answer += (output_tokens - self._mean_answer) / self._answers

    def tokens_per_second(self) -> float:
        """Prompt tokens computed and tokens generated a second; 0 before the first step."""
        if not self._steps:
            return 0.0
        return self._tokens / max(self._steps[-1][1] - self._steps[0][0], 1e-3)

    def wait_seconds(self, waiting: int, waiting_tokens: int) -> float:
        """How long it takes until this many requests with so many tokens to compute, and their answers, are through;
        0 where nothing was measured yet."""
        rate = self.tokens_per_second()
        return (waiting_tokens + waiting * self._mean_answer) / rate if rate else 0.0
