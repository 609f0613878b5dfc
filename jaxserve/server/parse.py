"""From the bytes of a body to a typed request; what this server does not do yet is refused by name."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from jaxserve.request import RequestError
from jaxserve.server.errors import ApiError
from jaxserve.server.responses.schemas import ResponsesRequest
from jaxserve.server.schemas import ChatRequest, CompletionRequest

logger = logging.getLogger(__name__)

# Known to change the answer, and not done yet. null is always neutral; so are the values named here.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "suffix": ("",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
NOT_SUPPORTED_PREFIXES = ("guided_", "lora")
FOREIGN: dict[type, frozenset[str]] = {
    ResponsesRequest: frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__))
}
"""Fields that only other routes have, and that a client would miss; null is neutral."""
MAX_DIGITS = 40
IGNORED = frozenset(("user", "metadata", "store", "stream_options", "service_tier", "safety_identifier"))

_reported: set[tuple[str, str]] = set()
"""Routes and names."""
MAX_REPORTED = 100


def check_content_type(content_type: str | None) -> None:
    """JSON in UTF-8, which is also what a body without the header is taken for."""
    if not content_type:
        return
    kind, _, options = content_type.lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", options)
    if kind.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8", "us-ascii")):
        raise ApiError(415, "The Content-Type must be application/json, in UTF-8.")


def parse_body[T](body: bytes, kind: type[T], route: str) -> T:
    """A request of this kind; raises ``RequestError``, naming the field, for what it cannot be. The log names the route
    with what is ignored."""
    # Some clients write every number with a point.
    value = {name: _integral(item) for name, item in _decode(body).items()}
    _check_fields(value, kind, route)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).replace("`", "").partition(" - at $.")
        field = path or (message.rpartition(" ")[2] if "missing required field" in message else "")
        text = f"{path}: {message}." if path else f"{message}."
        raise RequestError(text, param=re.split(r"[.\[]", field)[0] or None, code="invalid_type") from None
    except OverflowError:
        raise RequestError("A number in the request is too large.", code="invalid_type") from None


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and abs(value) < 2**64 and value.is_integer() else value


def _integer(digits: str) -> int | float:
    """A float for more digits than any limit has: none of its field's, which says so in few words."""
    if len(digits) <= MAX_DIGITS:
        return int(digits)
    return max(-sys.float_info.max, min(sys.float_info.max, float(digits)))


def _decode(body: bytes) -> dict[str, Any]:
    # The standard library's decoder, since it can see duplicate keys and NaN.
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer)
        if b"\\u" in body:
            msgspec.json.encode(value)  # half a surrogate pair passes for text until it is encoded
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from None
    except UnicodeError:
        raise RequestError("The body is not valid UTF-8 text.", code="invalid_json") from None
    except json.JSONDecodeError as error:
        what = "is empty" if not body else f"is not valid JSON: {error.msg} at character {error.pos}"
        raise RequestError(f"The body {what}.", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object holds the same key twice")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _check_fields(value: dict[str, Any], kind: type, route: str) -> None:
    for name in value.keys() - IGNORED - set(kind.__struct_fields__):  # type: ignore[attr-defined]
        if name in NOT_SUPPORTED or name.startswith(NOT_SUPPORTED_PREFIXES):
            if value[name] is not None and value[name] not in NOT_SUPPORTED.get(name, ()):
                raise not_supported(name)
        elif name in FOREIGN.get(kind, ()):
            if value[name] is not None:
                raise RequestError(f"{name} is not a field of {route}.", param=name, code="unsupported_parameter")
        else:
            _report_unknown(route, name)


def not_supported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported yet.", param=name, code="unsupported_parameter")


def _report_unknown(route: str, name: str) -> None:
    # A bounded number of them, since clients make names up.
    if (route, name) in _reported or len(_reported) >= MAX_REPORTED:
        return
    _reported.add((route, name))
    logger.warning("%s: unknown request field ignored: %.100r", route, name)
    if len(_reported) == MAX_REPORTED:
        logger.warning("%d unknown request fields were ignored; no more of them will be told", MAX_REPORTED)


def check_model(model: str | None, names: Iterable[str]) -> None:
    """A request may leave the model out; one that it names must be served here."""
    if model is not None and model not in names:
        raise unknown_model(model, names)


def unknown_model(name: str, names: Iterable[str]) -> ApiError:
    served = ", ".join(map(repr, names))
    message = f"The model {name[:200]!r} is not served here; this server has {served}."
    return ApiError(404, message, param="model", code="model_not_found")
