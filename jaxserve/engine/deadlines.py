"""When answers must end."""

from __future__ import annotations

from math import inf


class Deadlines:
    """Of unfinished requests, by id. Times are ``time.monotonic()`` seconds."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._next = inf
        """No deadline passes before this time."""

    def __len__(self) -> int:
        return len(self._times)

    def add(self, request_id: str, deadline: float) -> None:
        self._times[request_id] = deadline
        self._next = min(self._next, deadline)

    def forget(self, request_id: str) -> None:
        """The request has ended, or never had a deadline."""
        self._times.pop(request_id, None)

    def passed(self, now: float) -> list[str]:
        """The requests whose time is up; each must be forgotten."""
        if now < self._next:
            return []
        self._next = min((time for time in self._times.values() if time > now), default=inf)
        return [request_id for request_id, time in self._times.items() if time <= now]
