"""Llama 3.1 and later: the answer is ``{"name": …, "parameters": {…}}``, or several of these with semicolons."""

from __future__ import annotations

from jaxserve.server.tool_parsers.base import Steps, ToolParser

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    special_tokens = (TAG,)
    marked = False

    def _parse(self) -> Steps[None]:
        yield from self._space()
        if (yield from self._peek()) == "<":
            yield from self._expect(TAG)
            yield from self._space()
        while True:
            yield from self._call_object()
            yield from self._space()
            yield from self._expect(";")
            yield from self._space()
