"""Routes for whoever runs the server: health, metrics, version."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get, post

from jaxserve import __version__
from jaxserve.server.context import ServerContext, context_of
from jaxserve.server.errors import ApiError

METRICS_TYPE = "text/plain; version=0.0.4"  # Litestar adds the charset


@get(["/health", "/ready", "/ping"])
async def health(request: Request[Any, Any, Any]) -> dict[str, str]:
    """200 from the moment that a completion works, for as long as the engine makes progress."""
    context = context_of(request)
    context.check_serving()
    if not context.client.healthy():
        raise ApiError(503, "The engine has work and makes no progress.", code="engine_stuck")
    return {"status": "ok"}


@get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@get("/metrics")
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Prometheus' text format, from the engine, which alone counts. Also given while draining."""
    return Response(await _ask(context_of(request), "metrics"), media_type=METRICS_TYPE)


@get("/load")
async def load(request: Request[Any, Any, Any]) -> dict[str, int]:
    """The number of requests that run or wait."""
    counts = msgspec.msgpack.decode(await _ask(context_of(request), "load"), type=dict[str, int])
    return {"server_load": sum(counts.values())}


@post("/reset_prefix_cache", status_code=200)
async def reset_prefix_cache(request: Request[Any, Any, Any]) -> Response[None]:
    """Forgets all cached KV blocks; requests that run keep theirs."""
    await _ask(context_of(request), "reset_prefix_cache")
    return Response(None)


@get("/debug/steps")
async def debug_steps(request: Request[Any, Any, Any]) -> Response[bytes]:
    """What the engine's last steps did. Only with --enable-debug-steps, since it names other people's requests."""
    if not context_of(request).config.enable_debug_steps:
        raise ApiError(404, "There is no such route; --enable-debug-steps makes it.")
    return Response(await _ask(context_of(request), "debug_steps"), media_type="application/json")


async def _ask(context: ServerContext, method: str) -> bytes:
    try:
        return await context.client.call(method)
    except TimeoutError:
        raise ApiError(503, "The engine does not answer.", code="engine_stuck") from None
