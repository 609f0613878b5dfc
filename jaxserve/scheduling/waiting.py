"""Requests that wait for admission, in the order of their ranks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from jaxserve.request import Request

by_rank = attrgetter("rank")


class WaitingQueue:
    """New requests and preempted ones alike; the best rank stands first."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0
        """Of all of them together."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, place: int) -> Request:
        return self._requests[place]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=by_rank)
        self.num_tokens += request.num_tokens

    def pop(self, place: int) -> Request:
        request = self._requests.pop(place)
        self.num_tokens -= request.num_tokens
        return request

    def remove(self, request: Request) -> None:
        self.pop(bisect_left(self._requests, request.rank, key=by_rank))

    def tokens_of_first(self, count: int) -> int:
        """Tokens that so many, if they could be admitted now, want to compute."""
        ready = (request for request in self._requests if not request.is_held)
        return sum(request.num_tokens - request.num_computed_tokens for request in islice(ready, count))

    def check_integrity(self) -> None:
        assert self._requests == sorted(self._requests, key=by_rank), "the queue is out of order"
        assert self.num_tokens == sum(request.num_tokens for request in self._requests)
