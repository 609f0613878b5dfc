"""The tools of a request: what the model is shown, what it may call, and the schema that a forced call must match."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.config import ServerConfig
from jaxserve.request import RequestError, StructuredSpec
from jaxserve.server.schemas import ChatRequest, FunctionDefinition, Tool
from jaxserve.server.structured import make_spec
from jaxserve.server.tool_parsers import PARSERS, NamedParser, RequiredParser, ToolParser

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one answer may use tools."""

    tools: list[dict[str, Any]] | None
    """As the client wrote them, for the chat template; None where the model is not to know of any."""
    make_parser: Callable[[], ToolParser] | None = None
    """Finds the calls in an answer; None where there can be none."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that the parser must see."""
    structured: StructuredSpec | None = None
    """What a forced call is held to."""
    parallel: bool = True


def tool_use(request: ChatRequest, config: ServerConfig) -> ToolUse:
    """Raises ``RequestError`` for tools that cannot be, and for choices that this server was not started for."""
    functions = check_tools(request.tools)
    choice = _choice(request.tool_choice, functions)
    if choice is None or choice == "none":
        return ToolUse(None)
    names = [function.name for function in functions]
    parallel = request.parallel_tool_calls is not False
    if choice == "auto":
        parser = _auto_parser(config)
        return ToolUse(request.tools, lambda: parser(names), parser.special_tokens, parallel=parallel)
    if choice == "required":
        spec = make_spec("json", calls_schema(functions, parallel=parallel), "tool_choice")
        return ToolUse(request.tools, lambda: RequiredParser(names), structured=spec, parallel=parallel)
    assert isinstance(choice, FunctionDefinition)
    spec = make_spec("json", _arguments_schema(choice), "tool_choice")
    return ToolUse(request.tools, lambda: NamedParser([choice.name]), structured=spec)


def check_tools(tools: Sequence[Any] | None) -> list[FunctionDefinition]:
    """The functions of a ``tools`` field; raises ``RequestError`` for what is none."""
    functions = []
    for index, tool in enumerate(tools or ()):
        try:
            function = msgspec.convert(tool, Tool).function
        except msgspec.ValidationError as error:
            message, _, path = str(error).replace("`", "").partition(" - at $")
            raise RequestError(f"tools[{index}]{path}: {message}.", param="tools") from None
        if not NAME.fullmatch(function.name):
            raise RequestError(
                f"tools[{index}].function.name must have 1 to 64 letters, digits, underscores, dots and dashes.",
                param="tools",
            )
        kinds = (function.parameters or {}).get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise RequestError(
                f"tools[{index}].function.parameters must be the JSON Schema of an object.", param="tools"
            )
        functions.append(function)
    if len({function.name for function in functions}) < len(functions):
        raise RequestError("Two of the tools have the same name.", param="tools")
    return functions


def _choice(choice: Any, functions: Sequence[FunctionDefinition]) -> str | FunctionDefinition | None:
    """none, auto, required or the one function; None where there are no tools."""
    match choice:
        case None | "none" | "auto":
            return (choice or "auto") if functions else None
        case "required" if functions:
            return "required"
        case {"type": "function", "function": {"name": str(name)}}:
            for function in functions:
                if function.name == name:
                    return function
            raise RequestError("tool_choice names a function that is not among the tools.", param="tool_choice")
        case "required":
            raise RequestError("tool_choice needs tools.", param="tool_choice")
    raise RequestError('tool_choice must be "none", "auto", "required" or a function.', param="tool_choice")


def _auto_parser(config: ServerConfig) -> type[ToolParser]:
    if not config.enable_auto_tool_choice or config.tool_call_parser is None:
        raise RequestError(
            'tools with tool_choice "auto" need a server started with --enable-auto-tool-choice and'
            ' --tool-call-parser; tool_choice "none" does without.',
            param="tools",
            code="unsupported_parameter",
        )
    return PARSERS[config.tool_call_parser]


def calls_schema(functions: Sequence[FunctionDefinition], *, parallel: bool) -> dict[str, Any]:
    """The JSON Schema of a list of calls. Parameters become definitions, and references within them move along."""
    definitions = {
        f"tool_{index}": _rebased(_arguments_schema(function), f"#/$defs/tool_{index}")
        for index, function in enumerate(functions)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/tool_{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if parallel else {**schema, "maxItems": 1}


def _arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Arguments are an object, also where the parameters do not say so."""
    return {**(function.parameters or {}), "type": "object"}


_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")


def _rebased(schema: Any, root: str) -> Any:
    """A schema that has moved to ``root``: references into itself follow, names and data stay."""
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _rebased(item, root) for name, item in value.items()}
        else:
            moved[key] = value if key in _DATA else _rebased(value, root)
    return moved
