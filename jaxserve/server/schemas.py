"""The bodies of requests and answers, in OpenAI's shapes.

In answers a field that may be absent is ``UNSET``; one that must be there and may be null is ``None``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

ROLES = ("system", "developer", "user", "assistant", "tool")

# ------------------------------------------------------------------ requests; null means the default


def note(text: str) -> Meta:
    """What the documentation tells clients of a field that is not OpenAI's, or not plain."""
    return Meta(description=text)


Priority = Annotated[int | None, note("Lower first, under --scheduling-policy priority.")]
AddBos = Annotated[bool | None, note("Put BOS before the prompt. Default: for text; a chat's template does it.")]
CacheSalt = Annotated[str | None, note("Only prompts of the same salt share cached blocks.")]
TruncateTo = Annotated[int | None, note("Keep this many of the prompt's last tokens; -1: as many as fit.")]


class StreamOptions(Struct, kw_only=True):
    include_usage: Annotated[bool | None, note("A last chunk tells what was used.")] = None
    continuous_usage_stats: Annotated[bool | None, note("With include_usage: each chunk tells it so far.")] = None


class SamplingRequest(Struct, kw_only=True):
    """What all routes that generate text take, under the same names."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, note("Keep this many likeliest tokens; 0 or -1: all.")] = None
    min_p: Annotated[float | None, note("Drop tokens less likely than this times the likeliest.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float | None, note("Above 1: tokens used before become less likely.")] = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[int] | None, note("The answer holds no other tokens.")] = None
    bad_words: Annotated[list[str] | None, note("What the answer may not contain.")] = None
    min_tokens: Annotated[int | None, note("Neither EOS nor a stop ends the answer before it has so many.")] = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int] | None, note("Tokens that end the answer; they are not shown.")] = None
    ignore_eos: Annotated[bool | None, note("The model's own end does not end the answer.")] = None
    include_stop_str_in_output: Annotated[bool | None, note("The stop string stays in the text.")] = None
    skip_special_tokens: Annotated[bool | None, note("false: special tokens are written into the text.")] = None
    spaces_between_special_tokens: Annotated[bool | None, note("Either way the same: as they are written.")] = None
    truncate_prompt_tokens: TruncateTo = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    deadline_ms: Annotated[int | None, note("When so many ms are over, the answer ends with what it has.")] = None
    structured_outputs: Annotated[dict[str, Any] | None, note("json, json_object, regex, choice or grammar.")] = None
    stream: bool | None = None


class GenerationRequest(SamplingRequest, kw_only=True):
    """What completions and chat have in common."""

    n: int | None = None
    max_tokens: int | None = None
    best_of: Annotated[int | None, note("Draw so many answers and give the n likeliest; not with stream.")] = None
    add_special_tokens: AddBos = None
    prompt_logprobs: Annotated[int | None, note("Of the prompt's tokens and so many likeliest; not streamed.")] = None
    echo: Annotated[bool | None, note("The answer begins with the prompt, or a chat's final assistant message.")] = None
    return_token_ids: Annotated[bool | None, note("Tell the token ids of prompt and answer.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, note("Log-probabilities name tokens as token_id:ID.")] = None
    response_format: dict[str, Any] | None = None
    guided_json: Annotated[str | dict[str, Any] | bool | None, note("Older name of structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, note("Older name of structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, note("Older name of structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, note("Older name of structured_outputs.grammar.")] = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    add_generation_prompt: Annotated[bool | None, note("false: the assistant's turn is not opened.")] = None
    continue_final_message: Annotated[bool | None, note("The answer continues the final message.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, note("Variables of the chat template.")] = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Annotated[bool | None, note("false leaves the reasoning out of the answer.")] = None
    reasoning_effort: Annotated[str | None, note("A variable of the chat template, where that knows it.")] = None


class TextsRequest(Struct, kw_only=True):
    """What embeddings and scores have in common."""

    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncateTo = None
    priority: Priority = None
    cache_salt: CacheSalt = None


class EmbeddingRequest(TextsRequest, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, note("Only the number that the model has.")] = None


class ScoreRequest(TextsRequest, kw_only=True):
    """Pairs of texts: one with each, or as many as there are."""

    text_1: str | list[str]
    text_2: str | list[str]


class FunctionDefinition(Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, note("A JSON Schema of the arguments; null: there are none.")] = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition


class TokenizeRequest(Struct, kw_only=True):
    """Text or a conversation, one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: AddBos = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class AbortRequest(Struct, kw_only=True):
    request_id: Annotated[str, note("The id of the response that is to end.")]


# ------------------------------------------------------------------ answers


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int = 0


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RequestMetrics(Struct, kw_only=True):
    """Where the time of one call went, all its choices together."""

    queue_time_ms: float
    """From arrival to the first step."""
    prefill_time_ms: float
    """From there to the first token."""
    time_to_first_token_ms: float
    decode_time_ms: float
    """From the first token to the last."""
    mean_itl_ms: float
    """Mean time between tokens of a choice."""
    tokens_per_second: float
    """Generated tokens, from arrival to the last of them."""


class PromptLogprob(Struct, kw_only=True):
    logprob: float
    rank: int
    """1 for the likeliest."""
    decoded_token: str


class CompletionLogprobs(Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """An answer, and each chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class FunctionCallDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, kw_only=True):
    """Of a call, the first has an id, a type and a name; all have the next piece of the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Embedding(Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: str | tuple[float, ...]
    """Of length 1: numbers, or base64 of their float32."""


class EmbeddingUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(Struct, kw_only=True):
    object: str = "score"
    index: int
    score: float
    """The cosine of the angle between the embeddings of a pair."""


class ScoreList(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class ModelCard(Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(Struct, kw_only=True):
    prompt: str


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, kw_only=True):
    error: ErrorDetail
