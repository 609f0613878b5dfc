"""What the handlers share: one record for the life of an API process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from litestar.connection import ASGIConnection

from jaxserve.config import ServerConfig
from jaxserve.engine.admission import QueueLimits
from jaxserve.engine.client import EngineClient
from jaxserve.request import EngineRequest, RequestError, seed_source
from jaxserve.server.errors import ApiError
from jaxserve.server.grammar_check import GrammarCheck
from jaxserve.server.reasoning import ReasoningFormat, reasoning_format
from jaxserve.tokenizer import Tokenizer

MAX_DEADLINE_MS = 24 * 60 * 60 * 1000


@dataclass(slots=True)
class ServerContext:
    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    defaults: Mapping[str, Any]
    """Sampling defaults of the model; what a client sends goes before them."""
    draining: bool = False
    """Set on SIGTERM: what runs may finish, nothing new begins."""
    started: int = field(default_factory=lambda: int(time.time()))
    draw_seed: Callable[[], int] = field(init=False)
    reasoning: ReasoningFormat | None = field(init=False)
    grammar_check: GrammarCheck = field(init=False)

    def __post_init__(self) -> None:
        self.draw_seed = seed_source(self.config.engine.seed)
        name = self.config.reasoning_parser
        self.reasoning = reasoning_format(name) if name else None
        self.grammar_check = GrammarCheck(self.tokenizer)

    @property
    def reasoning_tags(self) -> tuple[str, ...]:
        return (self.reasoning.start, self.reasoning.end) if self.reasoning else ()

    @property
    def model_name(self) -> str:
        return self.config.model_names[0]

    def deadline(self, deadline_ms: int | None) -> float | None:
        """``time.monotonic()`` when an answer that begins now must end, by its client and by the server; raises
        ``RequestError``."""
        if deadline_ms is not None and not 1 <= deadline_ms <= MAX_DEADLINE_MS:
            given = str(deadline_ms)[:20]
            raise RequestError(
                f"deadline_ms must be between 1 and {MAX_DEADLINE_MS}, got {given}.", param="deadline_ms"
            )
        own = None if deadline_ms is None else deadline_ms / 1000
        limits = [seconds for seconds in (self.config.request_timeout, own) if seconds is not None]
        return time.monotonic() + min(limits) if limits else None

    def check_queue(self, deadline: float | None = None, requests: Sequence[EngineRequest] = ()) -> None:
        """Raises ``Overloaded`` if a new call would wait too long; ``requests`` are those of the call."""
        config = self.config
        limits = QueueLimits(
            config.max_num_queued_reqs,
            config.max_num_queued_tokens,
            config.max_queue_wait,
            num_clients=config.api_server_count,
        )
        self.client.check_queue(limits, deadline, requests)

    def check_serving(self) -> None:
        """Raises ``ApiError`` 503 unless a new request could be answered now."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        match self.client.state:
            case "dead":
                raise ApiError(503, "The engine is not running any more.", code="engine_dead")
            case "loading":
                raise ApiError(503, "The model is still loading.", code="loading")


def context_of(connection: ASGIConnection[Any, Any, Any, Any]) -> ServerContext:
    """The record of the application that this request came to."""
    context: ServerContext = connection.app.state.context
    return context


def new_id(kind: str) -> str:
    """An id of our own, also where the client sends one: two clients may send the same."""
    return f"{kind}-{secrets.token_hex(16)}"
