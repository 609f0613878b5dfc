"""From logits to the small array that goes to the host: token, its log-probability, and the likeliest ones."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from jaxserve.runner.batch import HAS_OPTIONS, BatchState
from jaxserve.runner.options import OptionsState, adjust, record
from jaxserve.scheduling.schedule import SchedulerOutput

Array = jax.Array

FAULTS = {
    -1: "the model gave non-finite logits",
    -2: "no token is left: allowed_token_ids, bad_words, min_tokens or a grammar exclude all of them",
}
"""What stands in a token's place if there is none."""
NON_FINITE, NOTHING_ALLOWED = FAULTS


class Kind(enum.StrEnum):
    GREEDY = "greedy"
    """Every row takes its likeliest token, and nobody asks for log-probabilities."""
    RANDOM = "random"
    FULL = "full"
    """Whatever a request can ask for."""


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
    def of(cls, schedule: SchedulerOutput, masked: bool) -> SamplerVariant:
        """The cheapest one that does what a step's rows want."""
        if schedule.options or masked:
            return cls(Kind.FULL, schedule.top_logprobs)
        if schedule.greedy and not schedule.logprobs:
            return cls(Kind.GREEDY)
        return cls(Kind.RANDOM, schedule.top_logprobs)


VARIANTS = (
    SamplerVariant(Kind.GREEDY),
    *(SamplerVariant(kind, top) for kind in (Kind.RANDOM, Kind.FULL) for top in (False, True)),
)


def choose_tokens(
    state: BatchState,
    logits: Array,
    rows: Array,
    *,
    variant: SamplerVariant,
    backend: str,
    max_logprobs: int,
    as_chain: bool = False,
) -> tuple[BatchState, Array]:
    """Sample ``logits[R, V]`` of ``rows[3, R]`` (slots, sequence lengths, whether the row samples), and leave the
    tokens in the state for the next step. Returns int32 ``[R, W]``: the token (or one of FAULTS), then unless all are
    greedy its log-probability, then with top log-probabilities ``max_logprobs`` ids and theirs (floats by their bits).
    Those are of the logits as the model gave them. ``as_chain``: as in ``pallas_kernels.sample``."""
    slots, seq_lens, _ = rows
    if variant.kind is Kind.GREEDY:
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        finite = jnp.isfinite(logits).all(-1)  # not of the maximum: whether that hands a NaN on depends on the backend
        return _remember(state, slots, tokens), jnp.where(finite, tokens, NON_FINITE)[:, None]
    tokens, normalizers = pallas_kernels.sample(
        logits, state.sampling_rows(slots), seq_lens, backend=backend, as_chain=as_chain
    )
    result = result_rows(tokens, logits, normalizers, max_logprobs if variant.top_logprobs else 0)
    return _remember(state, slots, tokens), result


def choose_with_options(
    state: BatchState,
    options: OptionsState,
    logits: Array,
    rows: Array,
    mask: Array,
    *,
    variant: SamplerVariant,
    backend: str,
    max_logprobs: int,
    as_chain: bool = False,
) -> tuple[BatchState, OptionsState, Array]:
    """The same, for any request. ``mask[R, ceil(V / 32)]`` has a bit for each token that a row may choose."""
    slots, seq_lens, samples = rows
    active = state.sampling[slots, HAS_OPTIONS] == 1
    sampling = state.sampling_rows(slots)
    adjusted, stats = adjust(options, logits, rows[:2], active, mask, sampling, backend=backend)
    tokens, normalizers = pallas_kernels.sample(
        adjusted, sampling, seq_lens, stats=stats, backend=backend, as_chain=as_chain
    )
    barred = jnp.take_along_axis(adjusted, tokens[:, None], 1)[:, 0] == -jnp.inf
    result = result_rows(tokens, logits, normalizers, max_logprobs if variant.top_logprobs else 0, barred)
    return _remember(state, slots, tokens), record(options, slots, tokens, active & (samples == 1)), result


def _remember(state: BatchState, slots: Array, tokens: Array) -> BatchState:
    return state._replace(last_tokens=state.last_tokens.at[slots].set(tokens))


def result_rows(tokens: Array, logits: Array, normalizers: Array, count: int, barred: Array | bool = False) -> Array:
    """Inside a program: tokens ``[R]`` (NON_FINITE where the normalizer is not finite, else NOTHING_ALLOWED where they
    are ``barred``), their log-probabilities, and ids and log-probabilities of the ``count`` likeliest, as
    ``split_result`` takes them apart."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], 1) - normalizers[:, None]
    shown = jnp.where(jnp.isfinite(normalizers), jnp.where(barred, NOTHING_ALLOWED, tokens), NON_FINITE)
    parts = [shown[:, None], _bits(chosen)]
    if count:
        top, ids = lax.top_k(logits, count)
        parts += [ids, _bits(top - normalizers[:, None])]
    return jnp.concatenate(parts, 1)


def _bits(floats: Array) -> Array:
    return lax.bitcast_convert_type(floats, jnp.int32)


def split_result(result: np.ndarray, max_logprobs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """On the host: tokens ``[R]``, their log-probabilities ``[R]``, top ids and log-probabilities
    ``[R, max_logprobs]``; those that the variant does not give are empty."""
    floats = result.view(np.float32)
    middle = 2 + max_logprobs
    return result[:, 0], floats[:, 1:2].reshape(-1), result[:, 2:middle], floats[:, middle:]
