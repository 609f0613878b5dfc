"""Routes for whoever runs the server: health, metrics, version."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
from litestar import HttpMethod, MediaType, Request, Response, get, post, route

from jaxserve import __version__
from jaxserve.server import openapi
from jaxserve.server.context import ServerContext, context_of
from jaxserve.server.docs_page import page
from jaxserve.server.errors import ApiError
from jaxserve.server.openai import read_body, serving
from jaxserve.server.schemas import AbortRequest

SECRET = ("api_key",)
"""Settings that nobody is told."""
METRICS_TYPE = "text/plain; version=0.0.4"  # Litestar adds the charset


@route(["/health", "/ready", "/ping"], http_method=[HttpMethod.GET, HttpMethod.HEAD])
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


@get("/server_info", guards=[serving])
async def server_info(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """What the server was started with, keys apart, and what the engine made of it."""
    context = context_of(request)
    config = msgspec.to_builtins(context.config)
    for name in SECRET:
        del config[name]
    return {"version": __version__, "config": config, "limits": msgspec.structs.asdict(context.client.info)}


@post("/v1/abort", status_code=200, guards=[serving])
async def abort(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """Ends a call by the id of its response, and with an error, whoever reads it."""
    context = context_of(request)
    body = await read_body(request, AbortRequest, context)
    return {"request_id": body.request_id, "aborted": await _in_time(context.client.cancel(body.request_id))}


@get("/openapi.json")
async def openapi_document(request: Request[Any, Any, Any]) -> dict[str, Any]:
    return _document(context_of(request))


@get("/docs", media_type=MediaType.HTML)
async def docs(request: Request[Any, Any, Any]) -> str:
    return page(_document(context_of(request)))


def _document(context: ServerContext) -> dict[str, Any]:
    info = context.client.info if context.client.state == "ready" else None
    return openapi.document(info, () if context.config.accept_any_model else context.config.model_names)


async def _ask(context: ServerContext, method: str) -> bytes:
    return await _in_time(context.client.call(method))


async def _in_time[T](answer: Awaitable[T]) -> T:
    try:
        return await answer
    except TimeoutError:
        raise ApiError(503, "The engine does not answer.", code="engine_stuck") from None
