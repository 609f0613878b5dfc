"""The door of the routes that need the engine: who cannot be let in is told so before anything is done for them."""

from __future__ import annotations

from litestar.types import ASGIApp, Receive, Scope, Send

from jaxserve.engine.admission import Overloaded
from jaxserve.server.context import ServerContext
from jaxserve.server.errors import ApiError, as_api_error, send_error

QUEUED_PATHS = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score"))
"""Calls of these wait in the engine's queue."""


class Door:
    """ASGI middleware in front of the routing: a refusal there costs less than half of one that a handler raises, which
    counts when most calls are refused. No body is read for it."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", "")).rstrip("/")
        if path in QUEUED_PATHS and scope.get("method") == "POST":
            try:
                self._context.check_serving()
                self._context.check_queue()
            except (ApiError, Overloaded) as error:
                await send_error(as_api_error(error), scope, send)
                return
        await self._app(scope, receive, send)
