"""From logits to the small array that goes to the host: token, its log-probability, and the likeliest ones."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from jaxserve.runner.batch import BatchState

Array = jax.Array

NON_FINITE = -1
"""In a token's place: the row's logits were not finite."""


@dataclass(frozen=True, order=True)
class SamplerVariant:
    """What a step's rows want; each variant is a program of its own, so that plain rows pay nothing."""

    greedy: bool
    logprobs: bool

    def __str__(self) -> str:
        return ("greedy" if self.greedy else "random") + (" + logprobs" if self.logprobs else "")


VARIANTS = tuple(SamplerVariant(g, p) for g in (True, False) for p in (False, True))


def choose_tokens(
    state: BatchState, logits: Array, rows: Array, *, variant: SamplerVariant, backend: str, max_logprobs: int
) -> tuple[BatchState, Array]:
    """Sample ``logits[R, V]`` of ``rows[2, R]`` (slots, sequence lengths), and leave the tokens in the state for the
    next step. Returns int32 ``[R, W]``: the token (NON_FINITE where the logits were broken), then with logprobs its
    log-probability, ``max_logprobs`` ids and their log-probabilities (floats by their bits)."""
    slots, seq_lens = rows
    if variant.greedy:
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    else:
        tokens = pallas_kernels.sample(logits, state.sampling_rows(slots), seq_lens, backend=backend)
    finite = jnp.isfinite(logits).all(-1)  # not of the maximum: whether that hands a NaN on depends on the backend
    result = [jnp.where(finite, tokens, NON_FINITE)[:, None]]
    if variant.logprobs:
        result += _logprobs(logits, tokens, max_logprobs)
    return state._replace(last_tokens=state.last_tokens.at[slots].set(tokens)), jnp.concatenate(result, 1)


def _logprobs(logits: Array, tokens: Array, count: int) -> list[Array]:
    logprobs = jax.nn.log_softmax(logits, -1)
    top, ids = lax.top_k(logprobs, count)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], 1)
    return [lax.bitcast_convert_type(chosen, jnp.int32), ids, lax.bitcast_convert_type(top, jnp.int32)]


def split_result(result: np.ndarray, max_logprobs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """On the host: tokens ``[R]``, their log-probabilities ``[R]``, top ids and log-probabilities
    ``[R, max_logprobs]``; the last three are empty without logprobs."""
    floats = result.view(np.float32)
    middle = 2 + max_logprobs
    return result[:, 0], floats[:, 1:2].reshape(-1), result[:, 2:middle], floats[:, middle:]
