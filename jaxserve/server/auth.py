"""API keys: with keys set, every route asks for one, but for a short list that says nothing about anybody."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from litestar.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.errors import ApiError, send_error

OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/version", "/load", "/metrics", "/docs", "/openapi.json"))


class ApiKeys:
    """ASGI middleware in front of the routing, so that a path nobody thought of is closed too."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "lifespan" or path in OPEN_PATHS or self._known(scope):
            await self._app(scope, receive, send)
            return
        fault = ApiError(401, "A valid API key is needed: Authorization: Bearer KEY.", code="invalid_api_key")
        await send_error(fault, scope, send, www_authenticate="Bearer")

    def _known(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        # All of them, and digests, so that the time tells neither which key is close nor how long one is.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
