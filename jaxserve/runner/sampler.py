"""From logits to the small array that goes to the host: token, its log-probability, and the likeliest ones."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from jaxserve.runner.batch import BatchState
from jaxserve.scheduling.schedule import SchedulerOutput

Array = jax.Array

NON_FINITE = -1
"""In a token's place: the row's logits were not finite."""


class Kind(enum.StrEnum):
    GREEDY = "greedy"
    """Every row takes its likeliest token, and nobody asks for log-probabilities."""
    RANDOM = "random"


@dataclass(frozen=True, order=True)
class SamplerVariant:
    """What a step's rows want; each variant is a program of its own, so that plain rows pay nothing."""

    kind: Kind
    top_logprobs: bool = False
    """Also the likeliest tokens; the chosen one's log-probability costs next to nothing and is always there, but in
    greedy steps."""

    def __str__(self) -> str:
        return self.kind + (" + top logprobs" if self.top_logprobs else "")

    @classmethod
    def of(cls, schedule: SchedulerOutput) -> SamplerVariant:
        """The cheapest one that does what a step's rows want."""
        if schedule.greedy and not schedule.logprobs:
            return cls(Kind.GREEDY)
        return cls(Kind.RANDOM, schedule.top_logprobs)


VARIANTS = (SamplerVariant(Kind.GREEDY), *(SamplerVariant(Kind.RANDOM, top) for top in (False, True)))


def choose_tokens(
    state: BatchState, logits: Array, rows: Array, *, variant: SamplerVariant, backend: str, max_logprobs: int
) -> tuple[BatchState, Array]:
    """Sample ``logits[R, V]`` of ``rows[2, R]`` (slots, sequence lengths), and leave the tokens in the state for the
    next step. Returns int32 ``[R, W]``: the token (NON_FINITE where the logits were broken), then unless it is greedy
    its log-probability, then with top log-probabilities ``max_logprobs`` ids and theirs (floats by their bits)."""
    slots, seq_lens = rows
    if variant.kind is Kind.GREEDY:
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        finite = jnp.isfinite(logits).all(-1)  # not of the maximum: whether that hands a NaN on depends on the backend
        result = []
    else:
        tokens, normalizers = pallas_kernels.sample(logits, state.sampling_rows(slots), seq_lens, backend=backend)
        finite = jnp.isfinite(normalizers)
        result = [_bits(jnp.take_along_axis(logits, tokens[:, None], 1) - normalizers[:, None])]
        if variant.top_logprobs:
            top, ids = lax.top_k(logits, max_logprobs)
            result += [ids, _bits(top - normalizers[:, None])]
    result = [jnp.where(finite, tokens, NON_FINITE)[:, None], *result]
    return state._replace(last_tokens=state.last_tokens.at[slots].set(tokens)), jnp.concatenate(result, 1)


def _bits(floats: Array) -> Array:
    return lax.bitcast_convert_type(floats, jnp.int32)


def split_result(result: np.ndarray, max_logprobs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """On the host: tokens ``[R]``, their log-probabilities ``[R]``, top ids and log-probabilities
    ``[R, max_logprobs]``; those that the variant does not give are empty."""
    floats = result.view(np.float32)
    middle = 2 + max_logprobs
    return result[:, 0], floats[:, 1:2].reshape(-1), result[:, 2:middle], floats[:, middle:]
