"""The access log: one line a request, written when its answer is complete or its client gone."""

from __future__ import annotations

import logging
import time
from typing import Any, cast

from litestar.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset(("/health", "/ready", "/ping", "/metrics"))
"""Asked every few seconds by machines: their lines would hide all others."""
MAX_PATH = 200
_FAULT = "jaxserve_fault"


def note_fault(scope: Scope, reason: str) -> None:
    """Has the log say why this request failed. A reason is made of codes and names of fields, never of a body."""
    cast(dict[str, Any], scope)[_FAULT] = reason


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
        complete = False

        async def watch(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            reason = scope.get(_FAULT) or ("" if complete else "the client left")
            logger.info(
                "%s %.*r %s %.1f ms%s",
                method,
                MAX_PATH,
                scope["path"],
                "-" if status is None else status,
                (time.monotonic() - begin) * 1000,
                f" ({reason})" if reason else "",
            )
