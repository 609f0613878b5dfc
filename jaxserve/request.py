"""What a caller asks of the engine: sampling parameters and one request's life."""

from __future__ import annotations

import enum
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite

import msgspec

INT64 = range(-(2**63), 2**63)
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128


class RequestError(ValueError):
    """A request that can never work. ``param`` names the field, ``code`` is OpenAI's word for the fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


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
    max_tokens: int | None = 16
    """Tokens to generate at most; None: as many as fit."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones; None: none at all."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0.0, 1e4), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
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
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if any(not 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop):
            raise ValueError(f"stop strings must have 1 to {MAX_STOP_LENGTH} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One answer to generate, as a client hands it to the engine (``n`` answers are ``n`` of these)."""

    request_id: str
    """Unique within its client; never the client's own X-Request-Id."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """Resolved: at least 1, and prompt + max_tokens fits the model and the KV pool."""
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


@dataclass(eq=False, slots=True)
class Request:
    """The engine's record of one request. Only the scheduler and the KV manager write it."""

    request_id: str
    client: bytes
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
    length_limit: int = field(init=False)
    """Tokens at which the answer has its max_tokens."""
    group: str = ""
    priority: int = 0
    cache_salt: str | None = None
    takes_cached_blocks: bool = True
    """False for one that wants to know something of every prompt token, so that all must be computed."""
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
    """Of these, how many stand in the device's block table."""
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
            request_id=item.request_id,
            client=client,
            prompt_len=len(item.prompt_token_ids),
            token_ids=list(item.prompt_token_ids),
            sampling=item.sampling,
            max_tokens=item.max_tokens,
            seed=item.seed,
            choice_index=item.choice_index,
            stop_ids=stop_ids if item.sampling.ignore_eos else stop_ids | eos_ids,
            arrival_time=item.arrival_time,
            arrival_order=order,
            group=item.group,
            priority=item.priority,
            cache_salt=item.cache_salt,
        )
