"""The access log: one line a request, written when its answer is complete or its client gone."""

from __future__ import annotations

import logging
import time

from litestar.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset(("/health", "/ready", "/ping", "/metrics"))
"""Asked every few seconds by machines: their lines would hide all others."""
MAX_PATH = 200


class AccessLog:
    """ASGI middleware around the whole application, so that unknown routes are seen too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        method: str = scope["method"]  # type: ignore[typeddict-item]  # not narrowed to HTTP
        begin = time.monotonic()
        status: int | None = None

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            logger.info(
                "%s %.*r %s %.1f ms",
                method,
                MAX_PATH,
                scope["path"],
                "-" if status is None else status,
                (time.monotonic() - begin) * 1000,
            )
