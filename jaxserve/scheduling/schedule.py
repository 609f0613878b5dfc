"""The contract between scheduler and runner: what one step computes. Frozen snapshots, no jax, no live requests."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.request import SamplingParams

DEVICE_TOKEN = -1
"""In ``token_ids``: the token that the slot's last step sampled, which only the device may know yet."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One sequence's part of a step."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    """Tokens to compute now, the last of ``seq_len``; a lone DEVICE_TOKEN while the sampled one is not collected."""
    seq_len: int
    """Tokens of the sequence after this step."""
    samples: bool
    """The last of them is the last known token: its logits choose the next."""
    block_ids: tuple[int, ...] | None
    """The whole block table where the device's row must be written anew, else None."""
    new_block: int | None
    """One block to append to the device's row (a decoding step that crossed into it), else None."""
    wants_logprobs: bool
    sampling: RowSampling | None
    """Given with ``block_ids`` when the request takes the slot."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A request's sampling parameters, as its slot keeps them."""

    params: SamplingParams
    seed: int
    choice_index: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. ``decode`` holds the requests that compute a single token, ``prefill`` the others."""

    decode: tuple[ScheduledRequest, ...]
    prefill: tuple[ScheduledRequest, ...]
    greedy: bool
    """No row that samples wants randomness."""
    logprobs: bool
    """Some row that samples wants log-probabilities."""
    preempted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[ScheduledRequest, ...]:
        """All requests, in the order of the step's results."""
        return self.decode + self.prefill

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.prefill)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + self.num_prefill_tokens
