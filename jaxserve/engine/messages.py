"""What the engine process and its clients say to each other: msgpack arrays over ZeroMQ."""

from __future__ import annotations

import msgspec

from jaxserve.request import EngineRequest


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position, before temperature and cuts."""

    logprob: float
    """Of the chosen token."""
    top_ids: list[int]
    """Likeliest first; as many as were asked for."""
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one prompt token, given what is before it."""

    logprob: float
    rank: int
    """1 for the likeliest."""
    top_ids: list[int]
    top_logprobs: list[float]


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """``time.monotonic()`` marks of one request."""

    arrival: float
    scheduled: float
    first_token: float
    last_token: float


DEADLINE = "deadline"
"""Stop reason of an answer that its deadline cut short; its finish reason is length, since OpenAI knows no better."""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, or its end."""

    request_id: str
    token_ids: list[int]
    """Includes the stop token that ended the answer, if one did."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, when the request asked for them."""
    finish_reason: str | None = None
    """stop, length, abort or error; set once, in the request's last output."""
    stop_reason: int | str | None = None
    """The caller's stop token id that ended the answer (None for the model's own EOS), or DEADLINE."""
    error: str | None = None
    timings: Timings | None = None
    """With the first token and with the last."""
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed: full blocks that an earlier request had left."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Of all prompt tokens but the first, where they were asked for; in the request's first output."""
    embedding: bytes | None = None
    """The pooled hidden states, normalised: float32, little-endian."""


# client -> engine


class Add(Message, frozen=True):
    requests: list[EngineRequest]


class Abort(Message, frozen=True):
    """Idempotent; unknown ids are ignored. An aborted request sends no further output."""

    request_ids: list[str]


class Finish(Message, frozen=True):
    """The client saw a stop string end in this token: end the request, count ``kept_tokens`` generated tokens."""

    request_id: str
    kept_tokens: int


class Refused(Message, frozen=True):
    """The client refused a call for this reason, before it became requests."""

    reason: str


class Call(Message, frozen=True):
    """Ask the engine: ``metrics`` (exposition text), ``load`` (number of requests running and waiting), ``cancel``,
    ``reset_prefix_cache``, ``debug_steps`` (the last steps as JSON)."""

    call_id: int
    method: str
    argument: str = ""
    """cancel: the id of a response, of whichever client. Its requests end, whose client is told, and are counted."""


class Hello(Message, frozen=True):
    """A client's first message: it is ready to hear."""


ClientMessage = Add | Abort | Finish | Refused | Call | Hello

# engine -> client


class Ready(Message, frozen=True):
    """Everything is loaded and compiled; answers every Hello from then on."""

    info: ModelInfo


class Outputs(Message, frozen=True):
    """All that one step has for this client; an empty list is a sign of life, sent about once a second."""

    outputs: list[TokenOutput]
    load: Load | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How long the queue is, so that a client can refuse at once what would wait too long."""

    waiting: int
    waiting_tokens: int
    """To be computed before those requests give their first tokens."""
    wait_seconds: float
    """Until what waits now is through, by the rates measured lately; 0 if there are none yet."""
    free_slots: int
    """Requests that could begin at once, if there are blocks for them."""
    received: int
    """Requests of this client that have arrived; those that it sent since are not counted above."""
    request_seconds: float = 0.0
    """By which each of them makes the wait longer."""


class Reply(Message, frozen=True):
    call_id: int
    result: bytes


EngineMessage = Ready | Outputs | Reply


class ModelInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a client needs to know of the running engine."""

    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    """Tokens that the KV pool holds at most, for one request alone."""
    max_logprobs: int
    hidden_size: int
    """Numbers in an embedding."""
    version: str
