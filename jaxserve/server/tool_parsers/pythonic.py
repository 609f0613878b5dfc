"""Llama 3.2 and others: the answer is a Python list of calls, ``[name(city="Paris", days=3), …]``.

A call goes out once it is complete: only then are its arguments known to be literals that JSON can hold.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from jaxserve.server.tool_parsers.base import MalformedError, Steps, ToolParser

JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_CALL = 100_000
"""Characters of one call."""


class PythonicParser(ToolParser):
    marked = False

    def _parse(self) -> Steps[None]:
        yield from self._list_of(self._call)
        self._end()

    def _call(self) -> Steps[None]:
        name = ""
        while (char := (yield from self._peek())).isalnum() or char in "_.-":
            name += yield from self._take()
        if name not in self._names:
            raise MalformedError
        arguments = _arguments((yield from self._parentheses()))
        self._begin(name)
        self._argue(arguments)
        self._end()

    def _parentheses(self) -> Steps[str]:
        """The text from an opening parenthesis to the one that closes it."""
        if (yield from self._peek()) != "(":
            raise MalformedError
        text, depth, quote = "", 0, ""
        while not text or depth:
            char = yield from self._take()
            text += char
            if quote:
                if char == "\\":
                    text += yield from self._take()
                elif char == quote:
                    quote = ""
            elif char in "\"'":
                quote = char
            else:
                depth += (char in "([{") - (char in ")]}")
            if len(text) > MAX_CALL:
                raise MalformedError
        return text


def _arguments(parentheses: str) -> str:
    """The keyword arguments of a call as a JSON object."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python may refuse one day
            call = ast.parse(f"f{parentheses}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise MalformedError
        values = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedError from None


def _literal(node: ast.expr) -> Any:
    """A Python literal, in which JSON's own names may stand too."""
    match node:
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = zip(keys, values, strict=True)
            return {str(key.value): _literal(value) for key, value in pairs if isinstance(key, ast.Constant)}
    return ast.literal_eval(node)
