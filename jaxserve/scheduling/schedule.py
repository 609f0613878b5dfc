"""The contract between scheduler and runner: what one step computes. Frozen snapshots, no jax, no live requests."""

from __future__ import annotations

import msgspec

from jaxserve.request import SamplingParams

DEVICE_TOKEN = -1
"""In ``token_ids``: the token that the slot's last step sampled, which only the device may know yet."""

MAX_CACHED_BLOCKS = 8192
"""Blocks that hold computed tokens already and that the requests of one step can bring along to their slots."""


class RowOptions(msgspec.Struct, frozen=True, gc=False):
    """What optional sampling state is built from."""

    token_ids: list[int]
    """The whole sequence: the prompt, and what has been generated."""
    prompt_len: int
    stop_ids: frozenset[int]


class RowSampling(msgspec.Struct, frozen=True, gc=False):
    """A request's sampling parameters, as its slot keeps them."""

    params: SamplingParams
    seed: int
    choice_index: int
    options: RowOptions | None = None
    """Given where ``params.has_options``."""


class PromptWork(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a chunk whose hidden states are looked at."""

    first: int
    """The first of them, counted from the chunk's beginning."""
    count: int
    targets: list[int] | None
    """The tokens that follow them, whose log-probabilities are wanted; None: the hidden states are added up."""


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step. A Struct, since hundreds are made every step."""

    request_id: str
    slot: int
    token_ids: list[int]
    """Tokens to compute now, the last of ``seq_len``; a lone DEVICE_TOKEN while the sampled one is not collected."""
    seq_len: int
    """Tokens of the sequence after this step."""
    samples: bool
    """The last of them is the last known token: its logits choose the next."""
    new_blocks: list[int]
    """Blocks that the device's table does not have yet; the last of them holds the last token of this step."""
    wants_logprobs: bool
    sampling: RowSampling | None
    """Given when the request takes the slot."""
    prompt_work: PromptWork | None = None
    """Only in ``SchedulerOutput.prefill``."""


class Swap(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one request that go to host memory, or come back from there in the same order."""

    request_id: str
    block_ids: list[int]


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``decode`` holds requests that go on with a single token and at most one new block, ``prefill`` the
    others: those that compute several tokens, those that take a slot, and those with prompt work."""

    decode: list[ScheduledRequest] = []
    prefill: list[ScheduledRequest] = []
    greedy: bool = True
    """No row that samples wants randomness."""
    logprobs: bool = False
    """Some row that samples wants log-probabilities."""
    top_logprobs: bool = False
    """Also of tokens that were not chosen."""
    options: bool = False
    """Some row that samples has penalties, biases, bad words or the like."""
    swap_out: tuple[Swap, ...] = ()
    """To be done before ``swap_in``, and both before the step."""
    swap_in: tuple[Swap, ...] = ()
    preempted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    queried_tokens: int = 0
    """Tokens of the requests that were admitted for the first time and looked for cached blocks …"""
    cached_tokens: int = 0
    """… and how many of those they found."""
    num_evicted: int = 0
    """Cached blocks that gave way since the step before."""

    @property
    def rows(self) -> list[ScheduledRequest]:
        """All requests, in the order of the step's results."""
        return self.decode + self.prefill

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.prefill)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + self.num_prefill_tokens
