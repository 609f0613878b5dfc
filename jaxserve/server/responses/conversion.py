"""From a request of ``/v1/responses`` to one of chat, so that everything else is shared."""

from __future__ import annotations

from typing import Any

from jaxserve.request import RequestError
from jaxserve.server.parse import not_supported
from jaxserve.server.responses.schemas import ResponsesRequest
from jaxserve.server.schemas import ChatRequest, SamplingRequest

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "n": (1,),
}
"""Fields that are refused, null and these values apart."""
INCLUDABLE = "message.output_text.logprobs"
_IGNORED_INCLUDES = ("reasoning.encrypted_content",)
_TEXT_PARTS = ("input_text", "output_text", "text")
_RENAMED = {
    "messages": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """The same request in chat's words; raises ``RequestError``."""
    for name, neutral in NEUTRAL.items():
        if (value := getattr(request, name)) is not None and value not in neutral:
            raise not_supported(name)
    for index, name in enumerate(request.include or ()):
        if name not in (INCLUDABLE, *_IGNORED_INCLUDES):
            raise RequestError(f"include[{index}]: only {INCLUDABLE} is supported.", param="include")
    logprobs = INCLUDABLE in (request.include or ())
    return ChatRequest(
        **{name: getattr(request, name) for name in SamplingRequest.__struct_fields__},
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs if logprobs else None,
        tools=[_tool(tool, index) for index, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text.format if request.text else None),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def renamed(error: RequestError) -> RequestError:
    """An error about chat's fields, told in this dialect's."""
    name = _RENAMED.get(error.param or "")
    if error.param is None or name is None:
        return error
    return RequestError(str(error).replace(error.param, name), param=name, code=error.code)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Calls and thoughts are items of their own here; in chat they belong to the assistant's message beside them."""
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            content = _content(output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case {"type": "reasoning"}:
            parts = item.get("content") or item.get("summary") or []
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            messages.append(
                {"role": "assistant", "reasoning": "\n".join(text for text in texts if isinstance(text, str))}
            )
        case {"role": "assistant", "content": content} if item.get("type", "message") == "message":
            message = _assistant(messages)
            if "content" in message or "tool_calls" in message:
                message = {"role": "assistant"}
                messages.append(message)
            message["content"] = _content(content, f"{where}.content")
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            messages.append({"role": role, "content": _content(content, f"{where}.content")})
        case _:
            kind = item.get("type", "message")
            raise RequestError(
                f"{where}: an item of type {str(kind)[:50]!r} like this is not supported.", param="input"
            )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that the conversation ends with, new if it does not."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "refusal" and kind not in _TEXT_PARTS:
            what = f"of type {kind[:50]!r} " if isinstance(kind, str) else ""
            raise RequestError(f"{where}[{index}]: a part {what}is not supported, text parts are.", param="input")
        parts.append(part if kind == "refusal" else {"type": "text", "text": part.get("text")})
    return parts


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"tools[{index}]: only functions are supported as tools.", param="tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is not None and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    return form
