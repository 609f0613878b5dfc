"""The client's own X-Request-Id goes back to it; nothing here is named after it."""

from __future__ import annotations

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.context import new_id

MAX_LENGTH = 256


class RequestIds:
    """ASGI middleware around everything that answers. ``always``: an id of our own where the client sent none."""

    def __init__(self, app: ASGIApp, *, always: bool) -> None:
        self._app = app
        self._always = always

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = [value for name, value in scope.get("headers", ()) if name == b"x-request-id"]
        request_id = sent[0] if sent and len(sent[0]) <= MAX_LENGTH else None
        if request_id is None and self._always:
            request_id = new_id("req").encode()
        if request_id is None:
            await self._app(scope, receive, send)
            return

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, with_id)
