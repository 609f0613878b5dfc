"""The OpenAPI document as a page that needs no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve import __version__
from jaxserve.server.openapi import OPERATIONS

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}h2{margin-top:2em;font-size:1.1em}"
    "table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2em 1em .2em 0;vertical-align:top}"
)


def page(document: dict[str, Any]) -> str:
    """Routes, under each the fields that it takes, and then the types that these speak of."""
    components = document["components"]["schemas"]
    parts, requests = [], []
    for operation in OPERATIONS:
        parts.append(f"<h2><code>{operation.method.upper()} {operation.path}</code></h2><p>{operation.summary}.</p>")
        if operation.request is not None:
            requests.append(components[operation.request.__name__])
            parts.append(_table(requests[-1]))
    for name in _mentioned(requests, components):
        parts.append(f'<h2 id="{name}">{name}</h2>{_table(components[name])}')
    return (
        f'<!doctype html><meta charset="utf-8"><title>jaxserve {__version__}</title><style>{_STYLE}</style>'
        f'<h1>jaxserve {__version__}</h1><p>Made from <a href="openapi.json">openapi.json</a>.</p>{"".join(parts)}'
    )


def _mentioned(schemas: Iterable[dict[str, Any]], components: dict[str, Any]) -> list[str]:
    """The components that schemas refer to, and those that these do."""
    names: list[str] = []
    waiting = list(schemas)
    while waiting:
        for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(waiting.pop(0))):
            if name not in names:
                names.append(name)
                waiting.append(components[name])
    return names


def _table(schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return f"<p>{_type(schema)}</p>"
    required = schema.get("required", ())
    rows = []
    for name, field in schema["properties"].items():
        told = ["Required."] if name in required else []
        if "description" in field:
            told.append(html.escape(field["description"], quote=False))
        rows.append(f"<tr><td><code>{name}</code><td>{_type(field)}<td>{' '.join(told)}")
    return f"<table>{''.join(rows)}</table>"


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, without the null that nearly every field may be."""
    words = " or ".join(dict.fromkeys(_options(schema))) or "null"
    return words + _bounds(schema) if "anyOf" in schema else words


def _options(schema: dict[str, Any]) -> Iterator[str]:
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _options(option)
    elif "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield f'<a href="#{name}">{name}</a>'
    elif "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        yield from (html.escape(json.dumps(value), quote=False) for value in values if value is not None)
    elif schema.get("type") == "array":
        items = _type(schema.get("items", {}))
        yield f"list of ({items})" if " or " in items or ", " in items else f"list of {items}"
    elif "properties" in schema:
        yield "{" + ", ".join(f"{name}: {_type(field)}" for name, field in schema["properties"].items()) + "}"
    else:
        kinds = schema.get("type", "anything")
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind != "null":
                yield kind + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    low: float | None = schema.get("minimum")
    high: float | None = schema.get("maximum")
    if "exclusiveMaximum" in schema:  # of integers alone
        high = schema["exclusiveMaximum"] - 1
    if high is None:
        return "" if low is None else f", at least {_number(low)}"
    return f", at most {_number(high)}" if low is None else f", {_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    """The limits of integers as powers of two, other numbers in full."""
    for power in (31, 63):
        if value == -(2**power):
            return f"-2<sup>{power}</sup>"
        if value == 2**power - 1:
            return f"2<sup>{power}</sup> - 1"
    return f"{int(value):,}" if value == int(value) else str(value)
