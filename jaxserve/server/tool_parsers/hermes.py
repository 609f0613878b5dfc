"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from jaxserve.server.tool_parsers.base import Steps, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    special_tokens = (OPEN, CLOSE)

    def _parse(self) -> Steps[None]:
        yield from self._content(OPEN)
        yield from self._space()
        yield from self._call_object()
        yield from self._space()
        yield from self._expect(CLOSE)
        self._end()
