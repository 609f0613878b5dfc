"""How models write tool calls, a module a format."""

from __future__ import annotations

from jaxserve.server.tool_parsers.base import CallDelta, Piece, ToolParser
from jaxserve.server.tool_parsers.forced import NamedParser, RequiredParser
from jaxserve.server.tool_parsers.hermes import HermesParser
from jaxserve.server.tool_parsers.llama3_json import Llama3JsonParser
from jaxserve.server.tool_parsers.mistral import MistralParser
from jaxserve.server.tool_parsers.pythonic import PythonicParser

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
"""By the names that ``--tool-call-parser`` takes."""

__all__ = ["PARSERS", "CallDelta", "NamedParser", "Piece", "RequiredParser", "ToolParser"]
