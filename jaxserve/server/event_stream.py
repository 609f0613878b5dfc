"""A streamed answer as it is sent: server-sent events until the end, or until the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from litestar import Litestar, Request, Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Send

PING_SECONDS = 15.0
"""Of silence, after which a comment keeps proxies and clients from giving up; no client sees it as an event."""
PING = b": ping\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(Response[bytes]):
    """Sends each item as one body message. The generator is closed when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(b"", media_type="text/event-stream", headers=HEADERS)
        self._events = events

    def to_asgi_response(
        self, app: Litestar | None, request: Request[Any, Any, Any], **options: Any
    ) -> _AsgiEventStream:
        headers = {**(options.get("headers") or {}), **self.headers}
        return _AsgiEventStream(self._events, headers=headers, media_type=self.media_type, status_code=200)


class _AsgiEventStream(ASGIResponse):
    """In the place of Litestar's own stream, whose task group costs more than the events, and which has no pings."""

    _should_set_content_length = False

    def __init__(self, events: AsyncGenerator[bytes, None], **options: Any) -> None:
        super().__init__(**options)
        self._events = events
        self._last_sent = 0.0

    async def send_body(self, send: Send, receive: Receive) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        writing = loop.create_task(self._write(send))
        watching = loop.create_task(self._watch(send, receive))
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()  # raises what went wrong
        finally:
            for task in (writing, watching):
                task.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        async with aclosing(self._events) as stream:
            async for events in stream:
                self._last_sent = now()
                await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Send, receive: Receive) -> None:
        """Sends pings until the client leaves."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout_at(self._last_sent + PING_SECONDS):
                    if (await receive())["type"] == "http.disconnect":
                        return
            except TimeoutError:
                if now() - self._last_sent >= PING_SECONDS:
                    self._last_sent = now()
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
