"""What a caller asks of the engine: sampling parameters and one request's life."""

from __future__ import annotations

import enum
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import msgspec

INT64 = range(-(2**63), 2**63)
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORDS_TOKENISED = 2 * MAX_BAD_WORDS
"""Each as it stands, and with a space before it."""
MAX_BAD_WORD_TOKENS = 8

RANGES = {
    "temperature": (0.0, 1e4),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 1e3),
}


class RequestError(ValueError):
    """A request that can never work. ``param`` names the field, ``code`` is OpenAI's word for the fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Thoughts(msgspec.Struct, frozen=True, kw_only=True):
    """What comes before the text that must match. A tag is text, or the id of a special token."""

    start: str | int
    end: str | int
    open: bool
    """The answer begins with thoughts even without ``start``; else there are none without it."""


class StructuredSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer's text must match."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar"]
    value: str = ""
    """A JSON Schema, a regular expression, a JSON list of strings, or a grammar; nothing for any JSON object."""
    field: str
    """The request's field that asked for it, which errors name."""
    thoughts: Thoughts | None = None
    """Of a reasoning model, which says what it likes in them."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one answer.

    Raises ``ValueError``, naming the field, for a value that can never work. Limits that depend on the
    model (vocabulary, context, logprobs cap) are checked where the model is known, by ``Limits.check``.
    """

    n: int = 1
    """Independent answers to the prompt; each has its own choice index."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, whatever the other fields say."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 0 keeps the best one."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest."""
    seed: int | None = None
    """The same seed and prompt give the same answer; None draws a fresh one."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer has already."""
    frequency_penalty: float = 0.0
    """Taken off them for each time."""
    repetition_penalty: float = 1.0
    """Makes tokens of the answer and of the prompt less likely where it is above 1: it divides logits above 0 and
    multiplies others."""
    logit_bias: dict[int, float] = {}
    """What to add to the logits of some token ids, after the penalties."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens; None: any."""
    bad_words: tuple[str, ...] = ()
    """What the answer may not contain, neither so nor with a space before it, as the tokenizer splits it. Who has the
    tokenizer puts the ids in ``bad_words_token_ids``."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer may not contain."""
    min_tokens: int = 0
    """Neither EOS nor a stop token or string ends the answer before it has this many tokens."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: as many as fit."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones; None: none at all."""
    prompt_logprobs: int | None = None
    """Likewise of the prompt's tokens, but for the first, which follows nothing."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured: StructuredSpec | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(value := getattr(self, name), str):  # not its characters
                msgspec.structs.force_setattr(self, name, (value,))
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not isfinite(value) or not low <= value <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or at least 0, got {self.top_k}")
        if self.top_k >= 2**31:
            raise ValueError("top_k must be below 2**31")
        if self.seed is not None and self.seed not in INT64:
            raise ValueError("seed must be a signed 64-bit integer")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {self.max_tokens}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must not be negative, got {self.logprobs}")
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise ValueError(f"prompt_logprobs must not be negative, got {self.prompt_logprobs}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if any(not 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop):
            raise ValueError(f"stop strings must have 1 to {MAX_STOP_LENGTH} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids")
        self._check_options()

    def _check_options(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias may hold at most {MAX_LOGIT_BIASES} ids, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias must be between -100 and 100, got {bias} for {token}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must hold at least one id")
        if len(self.bad_words) > MAX_BAD_WORDS or len(self.bad_words_token_ids) > MAX_BAD_WORDS_TOKENISED:
            raise ValueError(f"bad_words may hold at most {MAX_BAD_WORDS} words")
        if any(not 0 < len(word) <= MAX_STOP_LENGTH for word in self.bad_words) or not all(self.bad_words_token_ids):
            raise ValueError(f"bad_words must have 1 to {MAX_STOP_LENGTH} characters each")
        longest = max(map(len, self.bad_words_token_ids), default=0)
        if longest > MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad_words may have at most {MAX_BAD_WORD_TOKENS} tokens each, got one of {longest}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must not be negative, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must not be more than max_tokens = {self.max_tokens}, got {self.min_tokens}")

    @property
    def has_options(self) -> bool:
        """Whether the sampler must know more of the request than its last logits."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words_token_ids
            or self.min_tokens
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


Pooling = Literal["last", "mean"]
"""What stands for a whole text: the last token's hidden state, or the mean of all."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One answer to generate, as a client hands it to the engine (``n`` answers are ``n`` of these)."""

    request_id: str
    """Unique within its client; never the client's own X-Request-Id."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """Resolved: prompt + max_tokens fits the model and the KV pool; 0 only for what the prompt itself tells."""
    seed: int
    """Resolved: the caller's, or fresh random bits."""
    choice_index: int = 0
    arrival_time: float = 0.0
    """``time.monotonic()`` when the request came in; one clock for all processes of a machine."""
    group: str = ""
    """The call that this answer belongs to; all of a call's answers can be aborted by it."""
    priority: int = 0
    """Lower goes first, where the scheduling policy heeds it."""
    cache_salt: str | None = None
    """Cached blocks are shared only between requests of the same salt."""
    deadline: float | None = None
    """``time.monotonic()`` at which the answer ends with what it has by then."""
    pooling: Pooling | None = None
    """The prompt's embedding is wanted, pooled like this; max_tokens is 0 then."""


def fresh_seed() -> int:
    """64 random bits from the operating system, so that unseeded requests never repeat, not even over restarts."""
    return secrets.randbits(64) - 2**63


def seed_source(seed: int | None) -> Callable[[], int]:
    """Where unseeded requests get their seeds: a reproducible stream if a seed is given, else ``fresh_seed``."""
    if seed is None:
        return fresh_seed
    stream = random.Random(seed)
    return lambda: stream.getrandbits(64) - 2**63


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def engine_id(client: bytes, request_id: str) -> str:
    """What the engine calls a client's request: two clients may give theirs the same id."""
    return f"{client.hex()}/{request_id}" if client else request_id


@dataclass(eq=False, slots=True)
class Request:
    """The engine's record of one request. Only the scheduler and the KV manager write it."""

    request_id: str
    """Unique in the engine, see ``engine_id``."""
    client: bytes
    client_request_id: str
    prompt_len: int
    token_ids: list[int]
    """Prompt, then every token generated and collected so far."""
    sampling: SamplingParams
    max_tokens: int
    seed: int
    choice_index: int
    stop_ids: frozenset[int]
    """Tokens that end the answer: the caller's, and the model's EOS ids unless they are ignored."""
    arrival_time: float
    arrival_order: int
    has_options: bool
    """``sampling.has_options``, which is asked for every step."""
    length_limit: int = field(init=False)
    """Tokens at which the answer has its max_tokens."""
    group: str = ""
    priority: int = 0
    cache_salt: str | None = None
    is_held: bool = False
    """Not to be admitted yet: what its answer must match is not compiled."""
    pooling: Pooling | None = None
    takes_cached_blocks: bool = True
    """False for one that wants to know something of every prompt token, so that all must be computed."""
    examined_until: int = field(init=False, default=0)
    """Tokens at which those end whose hidden states are looked at, for log-probabilities or an embedding."""
    num_examined_tokens: int = field(init=False, default=0)
    """How many of these need no look, or had it in a step already submitted. A preemption changes nothing here."""
    prompt_results: list[Any] = field(default_factory=list)
    """What the steps saw, in the tokens' order, until the request's first output."""
    rank: tuple[float, int] = (0.0, 0)
    """The scheduler's order: the lowest is admitted first and preempted last."""

    status: Status = Status.WAITING
    slot: int = -1
    """Row of the device's batch state while running."""
    block_ids: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    """The root's, then those of the first full blocks, as far as somebody asked; known tokens never change."""
    num_passed_blocks: int = 0
    """Of the first blocks, how many a sliding window has passed: they were freed, and block 0 stands for them."""
    num_swapped_blocks: int = 0
    """Blocks that lie in host memory while the request waits to go on."""
    num_published_blocks: int = 0
    announced_block: bytes | None = None
    """Name of the block that this request computes next and that others wait for."""
    awaited_block: bytes | None = None
    """Name of the block that this request waits for while another one computes it."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found computed when the request was first admitted."""
    num_device_blocks: int = 0
    """Of its first blocks, how many the device's block table has."""
    num_computed_tokens: int = 0
    """Tokens whose KV is written, or will be by a step already submitted."""
    num_in_flight: int = 0
    """Sampled tokens of submitted steps that were not collected yet (their ids are known to the device alone)."""
    steps_in_flight: int = 0
    """Submitted, uncollected steps that touch this request's blocks."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    def __post_init__(self) -> None:
        self.length_limit = self.prompt_len + self.max_tokens
        if self.pooling is not None:
            self.examined_until = self.prompt_len
            self.num_examined_tokens = self.prompt_len - 1 if self.pooling == "last" else 0
        elif self.sampling.prompt_logprobs is not None:
            self.examined_until = self.prompt_len - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that will be known once every submitted step is collected."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @classmethod
    def create(cls, item: EngineRequest, *, client: bytes, eos_ids: frozenset[int], order: int) -> Request:
        stop_ids = frozenset(item.sampling.stop_token_ids)
        return cls(
            request_id=engine_id(client, item.request_id),
            client=client,
            client_request_id=item.request_id,
            prompt_len=len(item.prompt_token_ids),
            token_ids=list(item.prompt_token_ids),
            sampling=item.sampling,
            max_tokens=item.max_tokens,
            seed=item.seed,
            choice_index=item.choice_index,
            stop_ids=stop_ids if item.sampling.ignore_eos else stop_ids | eos_ids,
            arrival_time=item.arrival_time,
            arrival_order=order,
            has_options=item.sampling.has_options,
            group=item.group,
            priority=item.priority,
            cache_salt=item.cache_salt,
            pooling=item.pooling,
            takes_cached_blocks=item.sampling.prompt_logprobs is None and item.pooling != "mean",
        )
