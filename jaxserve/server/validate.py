"""From a typed request to prompts and sampling parameters: the HTTP side's half of the one door."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.chat_template import plain_messages
from jaxserve.config import ServerConfig
from jaxserve.engine import admission
from jaxserve.engine.messages import ModelInfo
from jaxserve.request import EngineRequest, RequestError, SamplingParams, StructuredSpec
from jaxserve.server.schemas import ROLES, ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from jaxserve.server.structured import structured_spec
from jaxserve.server.tools import check_tools
from jaxserve.tokenizer import Tokenizer

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What generation_config.json may set for requests that do not."""
COPIED = (
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "prompt_logprobs",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None
    """As the client wrote it; None where it sent ids. Of a conversation: the assistant's final message, if any."""


def completion_sampling(
    request: CompletionRequest, config: ServerConfig, defaults: Mapping[str, Any]
) -> SamplingParams:
    """The sampling parameters of a completion; raises ``RequestError``."""
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    sampling = _sampling(request, config, defaults, max_tokens=max_tokens, logprobs=request.logprobs)
    if request.echo and sampling.logprobs is not None:
        echoed = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        return msgspec.structs.replace(sampling, prompt_logprobs=echoed)
    return sampling


def chat_sampling(
    request: ChatRequest,
    config: ServerConfig,
    defaults: Mapping[str, Any],
    forced_call: StructuredSpec | None = None,
) -> SamplingParams:
    """The sampling parameters of a chat; raises ``RequestError``."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(request, name)
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"{name} must be at least 1, got {max_tokens}.", param=name)
    top = request.top_logprobs
    if top is not None and top < 0:
        raise RequestError(f"top_logprobs must not be negative, got {top}.", param="top_logprobs")
    if top is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    logprobs = (top or 0) if request.logprobs else None
    return _sampling(request, config, defaults, max_tokens=max_tokens, logprobs=logprobs, forced_call=forced_call)


def _sampling(
    request: GenerationRequest,
    config: ServerConfig,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    forced_call: StructuredSpec | None = None,
) -> SamplingParams:
    structured = structured_spec(request)
    if structured and forced_call:
        raise RequestError(f"{structured.field} and a forced tool_choice exclude each other.", param=structured.field)
    _check_choices(request, config)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true.", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs cannot be streamed; echo with logprobs can.", param="prompt_logprobs")
    values: dict[str, Any] = {name: defaults[name] for name in DEFAULTED if defaults.get(name) is not None}
    for name in (*DEFAULTED, *COPIED):
        if (value := getattr(request, name)) is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
    if request.logit_bias:
        values["logit_bias"] = _token_biases(request.logit_bias)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    try:
        return SamplingParams(
            **values, max_tokens=max_tokens, logprobs=logprobs, stop=tuple(stop), structured=structured or forced_call
        )
    except ValueError as error:
        # These messages begin with the name of the field.
        raise RequestError(f"{error}.", param=str(error).split()[0]) from None


def _token_biases(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(f"logit_bias must map token ids to numbers; {key[:50]!r} is no id.", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def _check_choices(request: GenerationRequest, config: ServerConfig) -> None:
    n = 1 if request.n is None else request.n
    if not 1 <= n <= config.max_choices:
        raise RequestError(f"n must be between 1 and {config.max_choices}, got {n}.", param="n")
    best_of = n if request.best_of is None else request.best_of
    if not n <= best_of <= config.max_choices:
        raise RequestError(f"best_of must be between n = {n} and {config.max_choices}, got {best_of}.", param="best_of")
    if best_of > n and request.stream:
        raise RequestError("best_of above n cannot be streamed: all answers must be known first.", param="best_of")


def candidates(sampling: SamplingParams, best_of: int | None) -> SamplingParams:
    """What the engine is asked for: with best_of more answers, and the log-probabilities to choose among them."""
    if best_of is None or best_of == sampling.n:
        return sampling
    return msgspec.structs.replace(sampling, n=best_of, logprobs=sampling.logprobs or 0)


def completion_prompts(request: CompletionRequest, config: ServerConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a completion in any of the four forms; raises ``RequestError``."""
    given = _split(request.prompt, "prompt")
    limit = 8 * config.max_choices
    if len(given) * (request.best_of or request.n or 1) > limit:
        raise RequestError(
            f"A request may ask for at most {limit} answers (prompts times n or best_of), and this one has"
            f" {len(given)} prompts.",
            param="prompt",
        )
    return prompts_of(request.prompt, "prompt", tokenizer, special=request.add_special_tokens is not False)


def prompts_of(
    value: str | list[str] | list[str | int | list[int]], field: str, tokenizer: Tokenizer, *, special: bool
) -> list[Prompt]:
    """The texts that a field holds in any of four forms; raises ``RequestError``."""
    prompts = []
    for item in _split(value, field):
        if not item:
            raise RequestError(f"A text of {field} is empty; at least one token is needed.", param=field)
        if isinstance(item, str):
            prompts.append(Prompt(tokenizer.encode(item, special), item))
        else:
            prompts.append(Prompt(item))
    return prompts


def truncate(prompts: list[Prompt], length: int | None, sampling: SamplingParams, info: ModelInfo) -> list[Prompt]:
    """The prompts, each cut down to its last tokens: ``length`` of them, or as many as fit for -1."""
    if length is None:
        return prompts
    limit = min(info.max_model_len, info.max_kv_tokens)
    if length == -1:
        length = max(1, limit - (1 if sampling.max_tokens is None else sampling.max_tokens))
    if not 1 <= length <= limit:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {limit}, got {length}.",
            param="truncate_prompt_tokens",
        )
    return [Prompt(prompt.token_ids[-length:]) if len(prompt.token_ids) > length else prompt for prompt in prompts]


def _split(value: str | list[str] | list[str | int | list[int]], field: str) -> Sequence[str | list[int]]:
    if isinstance(value, str):
        return [value]
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]  # type: ignore[list-item]
    if kinds in ({str}, {list}):
        return value  # type: ignore[return-value]
    what = "mixes text and ids" if kinds else "is an empty list"
    raise RequestError(
        f"{field} must be a string, a list of strings, a list of ids or a list of lists of ids; it {what}.",
        param=field,
    )


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> Prompt:
    """The prompt that the chat template makes of the messages; its text is what an echo repeats of them.

    Raises ``RequestError``.
    """
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    token_ids = encode_messages(
        tokenizer,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        tools=tools,
        kwargs=kwargs,
    )
    final = plain_messages(request.messages[-1:])[0] if request.echo else {"role": None}
    return Prompt(token_ids, final["content"] if final["role"] == "assistant" else None)


def encode_messages(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None,
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any] | None,
) -> list[int]:
    """Checks what every conversation needs, whatever its template, and encodes it."""
    if not messages:
        raise RequestError("messages must hold at least one message.", param="messages")
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise RequestError(f"messages[{index}].role must be one of {', '.join(ROLES)}.", param="messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    taken = {"messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"}
    if kwargs and (clash := taken & kwargs.keys()):
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(sorted(clash))}.", param="chat_template_kwargs"
        )
    return tokenizer.encode_chat(
        messages,
        add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        add_special_tokens=bool(add_special_tokens),
        tools=tools or None,
        **(kwargs or {}),
    )


def admit(
    request_id: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    body: GenerationRequest,
    info: ModelInfo,
    draw_seed: Callable[[], int],
    deadline: float | None,
    *,
    chat: bool,
) -> list[list[EngineRequest]]:
    """For each prompt the engine's requests, none where it would have nothing to do; raises ``RequestError``."""
    try:
        if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
            for prompt in prompts:
                admission.check(prompt.token_ids, sampling, info)
            return [[] for _ in prompts]
        return [
            admission.make_requests(
                f"{request_id}-{number}",
                prompt.token_ids,
                sampling,
                info,
                draw_seed=draw_seed,
                group=request_id,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                deadline=deadline,
            )
            for number, prompt in enumerate(prompts)
        ]
    except RequestError as error:
        # The door speaks of prompt and logprobs; the client is told its own fields.
        if error.param in ("prompt", "messages"):
            error.param = "messages" if chat else "prompt"
        elif error.param == "logprobs" and chat:
            raise RequestError(f"top_{error}", param="top_logprobs") from None
        raise


def tokens_of(request: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    """What /tokenize answers with; raises ``RequestError``."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("Either prompt or messages is needed.", param="prompt")
    if request.prompt is not None:
        return tokenizer.encode(request.prompt, request.add_special_tokens is not False)
    assert request.messages is not None
    check_tools(request.tools)
    return encode_messages(
        tokenizer,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        tools=request.tools,
        kwargs=request.chat_template_kwargs,
    )


def check_token_ids(token_ids: Sequence[int], info: ModelInfo) -> None:
    """Refuses ids that the model does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise RequestError(f"tokens holds {token_id}, which is not in [0, {info.vocab_size}).", param="tokens")
