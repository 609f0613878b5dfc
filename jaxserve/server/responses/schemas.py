"""The bodies of ``/v1/responses``. The events of a stream are plain objects, made in ``dialect``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType

from jaxserve.server.schemas import ChatTokenLogprob, RequestMetrics, SamplingRequest, note


class TextConfig(Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingRequest, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, note("Variables of the chat template.")] = None
    # Known, and refused unless neutral: there is no memory here, nothing runs by itself, and there is one answer.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    n: int | None = None


class OutputText(Struct, kw_only=True):
    type: str = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class MessageItem(Struct, kw_only=True):
    id: str
    type: str = "message"
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText]


class FunctionCallItem(Struct, kw_only=True):
    id: str
    type: str = "function_call"
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class ReasoningText(Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str = ""


class ReasoningItem(Struct, kw_only=True):
    id: str
    type: str = "reasoning"
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText]


type OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputTokensDetails(Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int
    """Of the reasoning's text, encoded again."""


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True):
    reason: str


class ResponseObject(Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Any]
    """Reasoning, messages and function calls, in the order in which they were said."""
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metrics: RequestMetrics | UnsetType = UNSET
