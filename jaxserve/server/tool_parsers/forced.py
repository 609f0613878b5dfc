"""Answers that a grammar holds to tool calls: tool_choice "required", and that of one function."""

from __future__ import annotations

from jaxserve.server.tool_parsers.base import Steps, ToolParser


class RequiredParser(ToolParser):
    """A list of ``{"name": …, "parameters": {…}}``."""

    marked = False
    forced = True

    def _parse(self) -> Steps[None]:
        yield from self._list_of(self._call_object)
        self._end()


class NamedParser(ToolParser):
    """The arguments of the one function that ``names`` holds."""

    marked = False
    forced = True

    def _parse(self) -> Steps[None]:
        yield from self._space()
        [name] = self._names
        yield from self._arguments(name)
        self._end()
