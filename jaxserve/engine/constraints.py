"""The requests whose answers are held to a grammar, and where each of them is in its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from jaxserve.request import Request
from jaxserve.scheduling.schedule import ScheduledRequest, SchedulerOutput
from jaxserve.structured import Grammars

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.02
"""How long to wait for a grammar when there is nothing else to do; in between, messages are read."""


class Constraints:
    """A request is held until its grammar is compiled. From then on it moves on with each token that was collected, and
    since a preempted request keeps its tokens, a preemption changes nothing here."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._executor = LLExecutor()
        self._compiling: dict[str, tuple[Request, Future[LLMatcher]]] = {}
        self._running: dict[str, tuple[Request, LLMatcher]] = {}

    def add(self, request: Request) -> None:
        """Hold a request, if its answer must match something, and have that compiled."""
        if request.sampling.structured is not None:
            request.is_held = True
            self._compiling[request.request_id] = request, self._grammars.compile(request.sampling.structured)

    def release(self) -> list[tuple[Request, str]]:
        """Let those go whose grammars are there; returns those that have none, and why."""
        failed = []
        for request_id, (request, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            if (error := future.exception()) is None:
                self._running[request_id] = request, future.result()
                request.is_held = False
            else:
                failed.append((request, str(error)))
        return failed

    def wait(self) -> bool:
        """Whether some request waits for its grammar, after waiting for a moment for the first."""
        wait([future for _, future in self._compiling.values()], WAIT_SECONDS, FIRST_COMPLETED)
        return bool(self._compiling)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if compiling := self._compiling.pop(request_id, None):
            compiling[1].cancel()  # unless it has begun
        self._running.pop(request_id, None)

    def needs_mask(self, schedule: SchedulerOutput) -> bool:
        """Whether some of a step's rows need a mask."""
        return bool(self._running) and any(row.samples and row.request_id in self._running for row in schedule.rows)

    def mask(self, rows: Sequence[ScheduledRequest]) -> np.ndarray:
        """int32 ``[len(rows), ceil(V / 32)]``, a bit for each token that a row may choose next. All that was sampled
        before must have been collected. What ends an answer may come where the grammar may end."""
        masks = np.full((len(rows), self._vocab_size // 32 + 1), -1, np.int32)
        bound = [
            (place, *self._running[row.request_id])
            for place, row in enumerate(rows)
            if row.samples and row.request_id in self._running
        ]
        if bound:
            fill_next_token_bitmask_par(self._executor, [(matcher, place) for place, _, matcher in bound], masks)
        bits = masks.view(np.uint32)
        for place, request, matcher in bound:
            if matcher.is_error():
                logger.warning("%s: the grammar fails: %.200s", request.request_id, matcher.get_error())
            elif matcher.is_accepting():
                for token in request.stop_ids:
                    bits[place, token // 32] |= np.uint32(1 << token % 32)
        return masks[:, : -(-self._vocab_size // 32)]

    def advance(self, request: Request, token_ids: list[int]) -> bool:
        """Go on with tokens that the request got; whether its grammar has come to its end."""
        if request.request_id not in self._running:
            return False
        matcher = self._running[request.request_id][1]
        return bool(matcher.consume_tokens(token_ids) and matcher.is_stopped() and matcher.is_accepting())
