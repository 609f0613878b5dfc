"""Chat templates: the checkpoint's Jinja source, run in a sandbox as transformers runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.request import RequestError


class ChatTemplate:
    """Turns messages into the text that a model was trained to continue.

    ``variables`` are what every rendering sees besides the messages: bos_token, eos_token and so on.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._template = _environment().from_string(source)
        self._variables = dict(variables)

    def knows(self, variable: str) -> bool:
        """Whether the template so much as mentions a variable."""
        return variable in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text; a template that refuses these messages raises ``RequestError``."""
        values = {
            **self._variables,
            "documents": None,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except Exception as error:
            # The sandbox computes from the messages alone: what fails in it, fails because of them.
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RequestError(f"The chat template refuses these messages: {kind}{error}", param="messages") from error


def read_template(directory: Path, config: Mapping[str, Any], name: str = "default") -> str | None:
    """A template of a checkpoint: a file of its own wins over the one in tokenizer_config.json.

    Where there are several by name, "default" is for chat and "tool_use" for chat with tools; a single one is for all.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    path = directory / "chat_template.json"
    template: Any = config.get("chat_template")
    if path.is_file():
        template = json.loads(path.read_bytes())["chat_template"]
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get(name)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{directory}: the chat template must be a string")
    return template


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the one form that templates are given: content a string, tool call arguments an object."""
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    if "content" not in plain and plain.get("role") != "assistant":
        raise RequestError(f"{where}.content is missing; only the assistant's may be.", param="messages")
    plain["content"] = _text(message.get("content"), where)
    if thoughts := _thoughts(message, where):
        plain["reasoning"] = plain["reasoning_content"] = thoughts  # templates know one or the other
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list.", param="messages")
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _thoughts(message: Mapping[str, Any], where: str) -> str | None:
    """What the assistant thought in an earlier turn, under either of its names."""
    for name in ("reasoning", "reasoning_content"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{where}.{name} must be a string.", param="messages")
    return message.get("reasoning") or message.get("reasoning_content")


def _text(content: Any, where: str) -> str:
    """Text parts are joined by newlines. No content (a message of tool calls) is the empty string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts.", param="messages")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            what = f"of type {kind[:50]!r} " if isinstance(kind, str) else ""
            raise RequestError(
                f"{where}.content[{index}]: a part {what}is not supported, text parts are.",
                param="messages",
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise RequestError(f"{where}.content[{index}].{kind} must be a string.", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    """OpenAI writes a call's arguments as a string of JSON; templates expect the object itself."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object.", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}.function.arguments must be JSON.", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with every string in it changed, keys of objects apart."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


class _Generation(Extension):
    """``{% generation %}`` marks what a training loss looks at; for serving it is nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
