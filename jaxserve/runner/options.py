"""Optional sampling state: what penalties, biases, masks and bad words need to know of each slot.

It belongs to the sampler's ``full`` variants alone. A row of it is loaded from the request's ids when the request takes
its slot, be it for the first time or after a preemption; from then on the device itself adds the tokens it samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from jaxserve.models.config import MAX_EOS_IDS
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS_TOKENISED,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from jaxserve.scheduling.schedule import RowOptions
from pallas_kernels.adjust import EDITS_AT_ONCE, SEEN_MAX, Allowed, Edits, Penalties
from pallas_kernels.sampling import SamplingRows

Array = jax.Array

NONE = -1
"""In the place of a token id."""
MAX_STOPS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS
"""A request's own, and the model's."""
LOADED_AT_ONCE = 4096
"""Ids that one call of ``load_row`` takes."""
PROMPT, GENERATED, ALLOWED = range(3)
"""What such an id is."""
NUMBERS = 4
MAX_BARRED = -(-(MAX_BAD_WORDS_TOKENISED + MAX_STOPS) // EDITS_AT_ONCE) * EDITS_AT_ONCE
"""Bad words and stops, in whole blocks of edits."""


class OptionsState(NamedTuple):
    """Device-resident, a row a slot, as in ``BatchState``."""

    seen: Array  # int16 [slots + 1, V], how often generated; the sign: in the prompt
    allowed: Array  # int32 [slots + 1, ceil(V / 32)], a bit a token
    numbers: Array  # int32 [slots + 1, NUMBERS]: three penalties by their bits, and the first length to stop at
    bias_ids: Array  # int32 [slots + 1, MAX_LOGIT_BIASES]
    edit_values: Array  # float32 [slots + 1, MAX_LOGIT_BIASES + MAX_BARRED], what is added to logits: biases, then -inf
    bad_words: Array  # int32 [slots + 1, MAX_BAD_WORDS_TOKENISED, MAX_BAD_WORD_TOKENS], NONE in front of shorter ones
    stop_ids: Array  # int32 [slots + 1, MAX_STOPS]
    recent: Array  # int32 [slots + 1, MAX_BAD_WORD_TOKENS - 1], the latest generated tokens, the last one last


def mask_words(vocab: int) -> int:
    """int32 words of a mask with a bit a token."""
    return -(-vocab // 32)


def options_shapes(slots: int, vocab: int) -> OptionsState:
    """The state's arrays without memory behind them."""

    def shape(*sizes: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct((slots + 1, *sizes), dtype)

    return OptionsState(
        seen=shape(vocab, dtype=np.int16),
        allowed=shape(mask_words(vocab)),
        numbers=shape(NUMBERS),
        bias_ids=shape(MAX_LOGIT_BIASES),
        edit_values=shape(MAX_LOGIT_BIASES + MAX_BARRED, dtype=np.float32),
        bad_words=shape(MAX_BAD_WORDS_TOKENISED, MAX_BAD_WORD_TOKENS),
        stop_ids=shape(MAX_STOPS),
        recent=shape(MAX_BAD_WORD_TOKENS - 1),
    )


class _RowLayout(NamedTuple):
    """The parts of the vector that ``load_row`` takes."""

    head: slice  # slot, whether it is the row's first, and its allowed words to begin with
    numbers: slice
    biases: slice
    bad_words: slice
    stop_ids: slice
    recent: slice
    ids: slice
    kinds: slice


_SIZES = (
    3,
    NUMBERS,
    2 * MAX_LOGIT_BIASES,
    MAX_BAD_WORDS_TOKENISED * MAX_BAD_WORD_TOKENS,
    MAX_STOPS,
    MAX_BAD_WORD_TOKENS - 1,
    LOADED_AT_ONCE,
    LOADED_AT_ONCE,
)
_ENDS = np.cumsum(_SIZES).tolist()
_LAYOUT = _RowLayout(*(slice(a, b) for a, b in zip([0, *_ENDS[:-1]], _ENDS, strict=True)))
ROW_WORDS = _ENDS[-1]
"""int32 words of ``load_row``'s vector."""


def pack_row(slot: int, params: SamplingParams, options: RowOptions) -> Iterator[np.ndarray]:
    """The vectors for ``load_row`` that make a slot's row, one after the other."""
    generated = options.token_ids[options.prompt_len :]
    allowed = params.allowed_token_ids or ()
    packed = np.full(ROW_WORDS, NONE, np.int32)
    head, numbers, biases, bad_words, stop_ids, recent, ids, kinds = (packed[part] for part in _LAYOUT)
    head[:] = slot, 1, 0 if allowed else -1
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    numbers[:3] = np.array(penalties, np.float32).view(np.int32)
    numbers[3] = options.prompt_len + params.min_tokens
    count = len(params.logit_bias)
    biases[:count] = list(params.logit_bias)
    values = np.array([*params.logit_bias.values()], np.float32)
    biases[MAX_LOGIT_BIASES : MAX_LOGIT_BIASES + count] = values.view(np.int32)
    for word, row in zip(params.bad_words_token_ids, bad_words.reshape(-1, MAX_BAD_WORD_TOKENS), strict=False):
        row[-len(word) :] = word
    assert len(options.stop_ids) <= MAX_STOPS
    stop_ids[: len(options.stop_ids)] = list(options.stop_ids)
    latest = generated[-len(recent) :]
    recent[len(recent) - len(latest) :] = latest

    items = [*options.token_ids, *allowed]
    kind = np.repeat([PROMPT, GENERATED, ALLOWED], [options.prompt_len, len(generated), len(allowed)])
    for start in range(0, len(items), LOADED_AT_ONCE):
        part = items[start : start + LOADED_AT_ONCE]
        ids[: len(part)], kinds[: len(part)], kinds[len(part) :] = part, kind[start : start + len(part)], NONE
        head[1] = start == 0
        yield packed.copy()


def load_row(state: OptionsState, packed: Array) -> OptionsState:
    """Inside a program: the state with a slot's row as one of ``pack_row``'s vectors has it."""
    slot, first, allowed = packed[_LAYOUT.head]
    ids, kinds = packed[_LAYOUT.ids], packed[_LAYOUT.kinds]
    vocab = state.seen.shape[1]

    def counted(kind: int, size: int = vocab) -> Array:
        return jnp.zeros(size, jnp.int32).at[jnp.where(kinds == kind, ids, size)].add(1, mode="drop")

    before = jnp.where(first == 1, 0, state.seen[slot].astype(jnp.int32))
    in_prompt = (before < 0) | (counted(PROMPT) > 0)
    generated = jnp.minimum((before & SEEN_MAX) + counted(GENERATED), SEEN_MAX)
    seen = jnp.where(in_prompt, generated | ~SEEN_MAX, generated).astype(jnp.int16)
    bits = (counted(ALLOWED, 32 * mask_words(vocab)) > 0).reshape(-1, 32)
    words = jnp.sum(jnp.where(bits, jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32), 0), -1, dtype=jnp.uint32)
    allowed = jnp.where(first == 1, allowed, state.allowed[slot]) | lax.bitcast_convert_type(words, jnp.int32)
    rest = {name: packed[getattr(_LAYOUT, name)] for name in ("numbers", "bad_words", "stop_ids", "recent")}
    bias_ids, biases = packed[_LAYOUT.biases].reshape(2, -1)
    barring = jnp.full(MAX_BARRED, -jnp.inf, jnp.float32)
    edit_values = jnp.concatenate([lax.bitcast_convert_type(biases, jnp.float32), barring])
    row = OptionsState(seen=seen, allowed=allowed, bias_ids=bias_ids, edit_values=edit_values, **rest)
    return OptionsState(*(a.at[slot].set(new.reshape(a.shape[1:])) for a, new in zip(state, row, strict=True)))


def adjust(
    state: OptionsState,
    logits: Array,
    rows: Array,
    active: Array,
    mask: Array,
    sampling: SamplingRows,
    *,
    backend: str,
) -> tuple[Array, tuple[Array, ...]]:
    """Inside a program: what the options of ``rows`` (slots, sequence lengths) make of ``logits[R, V]``, and the
    ``stats`` for sampling from it with these parameters. Rows that are not ``active`` have no options;
    ``mask[R, ceil(V / 32)]``, a bit a token, is for all.

    Penalties come first, so that a bias is added as it is.
    """
    slots, seq_lens = rows
    vocab, inactive = logits.shape[1], ~active[:, None]
    numbers = state.numbers[slots]
    penalties = jnp.where(inactive, jnp.array([0.0, 0.0, 1.0]), lax.bitcast_convert_type(numbers[:, :3], jnp.float32))
    allowed = Allowed(mask, state.allowed, active.astype(jnp.int32))
    words = state.bad_words[slots]
    matches = ((words[:, :, :-1] == NONE) | (words[:, :, :-1] == state.recent[slots][:, None])).all(-1)
    bad_words = jnp.where(matches, words[:, :, -1], NONE)
    stop_ids = jnp.where((seq_lens < numbers[:, 3])[:, None], state.stop_ids[slots], NONE)
    nothing = jnp.full((len(slots), MAX_BARRED - bad_words.shape[1] - stop_ids.shape[1]), NONE)
    ids = jnp.concatenate([state.bias_ids[slots], bad_words, stop_ids, nothing], 1)
    edits = Edits.of(jnp.where(inactive | (ids == NONE), vocab, ids), state.edit_values, vocab)
    return pallas_kernels.adjust_logits(
        logits, state.seen, slots, Penalties(*penalties.T), allowed, edits, sampling, backend=backend
    )


def record(state: OptionsState, slots: Array, tokens: Array, sampled: Array) -> OptionsState:
    """Inside a program: the state with the tokens ``[R]`` of the rows that really ``sampled``."""
    rows = jnp.where(sampled, slots, len(state.seen))
    before = state.seen[slots, tokens]
    after = jnp.where(before & SEEN_MAX == SEEN_MAX, before, before + 1)
    recent = jnp.concatenate([state.recent[slots][:, 1:], tokens[:, None]], 1)
    return state._replace(
        seen=state.seen.at[rows, tokens].set(after, mode="drop"), recent=state.recent.at[rows].set(recent, mode="drop")
    )
