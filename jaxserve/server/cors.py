"""Cross-origin requests of browsers, for the origins that the server was started with."""

from __future__ import annotations

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.config import ServerConfig

MAX_AGE = 600
EXPOSED = "X-Request-Id, Server-Timing, Retry-After"


class Cors:
    """ASGI middleware around authentication: a preflight has no key, and a refusal must be readable too."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = sent.get(b"origin", b"").decode("latin-1")
        allowed = self._config.allowed_origins
        if not origin or not ("*" in allowed or origin in allowed):
            await self._app(scope, receive, send)
            return
        headers = self._headers(origin)
        method = sent.get(b"access-control-request-method")
        if scope["method"] == "OPTIONS" and method is not None:  # type: ignore[typeddict-item]
            headers += self._preflight(method, sent.get(b"access-control-request-headers", b""))
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _headers(self, origin: str) -> list[tuple[bytes, bytes]]:
        credentials = self._config.allow_credentials
        any_origin = "*" in self._config.allowed_origins and not credentials
        headers = [
            (b"access-control-allow-origin", b"*" if any_origin else origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED.encode()),
        ]
        if credentials:
            headers.append((b"access-control-allow-credentials", b"true"))
        return headers if any_origin else [*headers, (b"vary", b"Origin")]

    def _preflight(self, method: bytes, names: bytes) -> list[tuple[bytes, bytes]]:
        methods, allowed = self._config.allowed_methods, self._config.allowed_headers
        return [
            (b"access-control-allow-methods", method if "*" in methods else ", ".join(methods).encode()),
            (b"access-control-allow-headers", names if "*" in allowed else ", ".join(allowed).encode()),
            (b"access-control-max-age", str(MAX_AGE).encode()),
        ]
