"""Every fault becomes OpenAI's error body, with the status that fits and nothing of our insides."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import Scope, Send

from jaxserve.engine.admission import Overloaded
from jaxserve.engine.client import EngineDeadError, EngineUnavailableError
from jaxserve.request import RequestError
from jaxserve.server.access import note_fault
from jaxserve.server.schemas import ErrorDetail, ErrorResponse

logger = logging.getLogger(__name__)

RETRY_AFTER = 5
CLIENT_CLOSED_REQUEST = 499

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    500: "internal_error",
    503: "unavailable",
}
_MESSAGES = {
    404: "There is no such route.",
    405: "This route does not take that method.",
    500: "The server failed to answer this request.",
}


class ApiError(Exception):
    """An error with all that its body and headers need."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = RETRY_AFTER,
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)

    @property
    def reason(self) -> str:
        """For logs: the code and the field, but nothing of what the client sent."""
        return " ".join(filter(None, (self.code or "invalid_request", self.param)))

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after)} if self.status in (429, 503) else {}

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorResponse(error=detail))


class GenerationAbortedError(RuntimeError):
    """Somebody asked for the end of this call, through another one."""


class GenerationError(RuntimeError):
    """The engine gave up one request, for a reason that it tells."""


class ClientDisconnectedError(RuntimeError):
    """The client left before its answer was ready."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of a fault; one that nobody foresaw is logged here."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case Overloaded():
            return ApiError(429, str(error), code="overloaded", retry_after=error.retry_after)
        case EngineDeadError():
            return ApiError(503, "The engine is not running any more.", code="engine_dead")
        case EngineUnavailableError():
            return ApiError(503, f"The server cannot answer now: {error}.", code="unavailable")
        case GenerationError():
            return ApiError(500, str(error), code="generation_failed")
        case GenerationAbortedError():
            return ApiError(CLIENT_CLOSED_REQUEST, str(error), code="request_aborted")
        case ClientDisconnectedError():
            return ApiError(CLIENT_CLOSED_REQUEST, str(error), code="client_closed_request")
        case HTTPException() if error.status_code < 500:
            return ApiError(error.status_code, _MESSAGES.get(error.status_code, error.detail))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, _MESSAGES[500])


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's exception handler for everything."""
    fault = as_api_error(error)
    note_fault(request.scope, fault.reason)
    headers = fault.headers
    if isinstance(error, HTTPException) and error.headers:
        headers.update({name: value for name, value in error.headers.items() if name.lower() == "allow"})
    return Response(fault.body(), status_code=fault.status, media_type="application/json", headers=headers)


async def send_error(fault: ApiError, scope: Scope, send: Send, **headers: str) -> None:
    """Answers with an error in front of the routing; ``headers`` are additional ones, with _ for -."""
    note_fault(scope, fault.reason)
    body = fault.body()
    lines = {"content-type": "application/json", "content-length": str(len(body)), **fault.headers, **headers}
    start = [(name.lower().replace("_", "-").encode(), value.encode()) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})
