"""Optional sampling state against the same read plainly, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.request import SamplingParams
from jaxserve.runner import options
from jaxserve.runner.options import OptionsState, adjust, load_row, options_shapes, pack_row, record
from jaxserve.scheduling.schedule import RowOptions

SLOTS, VOCAB = 3, 70

load = jax.jit(load_row)
adjust_jit = jax.jit(adjust, static_argnames="backend")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def loaded(rows: dict[int, tuple[SamplingParams, list[int], int]], dirty: bool = True) -> OptionsState:
    """State with these rows: parameters, tokens and how many of them are the prompt's."""
    state = jax.tree.map(lambda a: jnp.full(a.shape, 5 if dirty else 0, a.dtype), options_shapes(SLOTS, VOCAB))
    for slot, (params, tokens, prompt_len) in rows.items():
        row = RowOptions(tokens, prompt_len, frozenset(params.stop_token_ids))
        for packed in pack_row(slot, params, row):
            state = load(state, packed)
    return state


def expected_logits(logits: np.ndarray, params: SamplingParams, tokens: list[int], prompt_len: int) -> np.ndarray:
    logits = logits.astype(np.float64)
    generated = np.bincount(tokens[prompt_len:], minlength=VOCAB)
    repeated = np.isin(np.arange(VOCAB), tokens)
    scaled = np.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    logits = np.where(repeated, scaled, logits)
    logits -= params.frequency_penalty * generated + params.presence_penalty * (generated > 0)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    barred = set() if params.allowed_token_ids is None else set(range(VOCAB)) - set(params.allowed_token_ids)
    if len(tokens) - prompt_len < params.min_tokens:
        barred |= set(params.stop_token_ids)
    for *prefix, last in params.bad_words_token_ids:
        if not prefix or tokens[prompt_len:][-len(prefix) :] == prefix:
            barred.add(last)
    logits[list(barred)] = -np.inf
    return logits


EACH = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {0: 3.0, 69: -100.0, 5: 0.25}},
    "allowed": {"allowed_token_ids": (0, 1, 31, 32, 63, 64, 69)},
    "min_tokens": {"stop_token_ids": (3, 69), "min_tokens": 4},
    "min_tokens reached": {"stop_token_ids": (3, 69), "min_tokens": 3},
    "bad words": {"bad_words_token_ids": ((9,), (8, 10), (7, 8, 11), (8, 7, 12), (6, 7, 8, 13), (0,) * 7 + (14,))},
}
EACH["all"] = {name: value for part in EACH.values() for name, value in part.items()}


@pytest.mark.parametrize("name", EACH)
def test_every_option_does_what_it_says(rng, name):
    params = SamplingParams(**EACH[name])
    tokens = [*rng.integers(0, VOCAB, 20).tolist(), 6, 7, 8]
    other = SamplingParams(frequency_penalty=1.0)
    state = loaded({2: (params, tokens, 20), 0: (other, [1, 2, 2], 1)})
    logits = rng.standard_normal((3, VOCAB)).astype(np.float32) * 3
    rows, active = np.array([[2, 0, 1], [23, 3, 9]], np.int32), np.array([True, True, False])
    mask = np.full((3, options.mask_words(VOCAB)), -1, np.int32)
    mask[2, 1] = 0
    got, [normalizers] = adjust_jit(state, logits, rows, active, mask, None, backend="reference")
    np.testing.assert_allclose(got[0], expected_logits(logits[0], params, tokens, 20), rtol=1e-5)
    np.testing.assert_allclose(got[1], expected_logits(logits[1], other, [1, 2, 2], 1), rtol=1e-5)
    np.testing.assert_array_equal(got[2], np.where(np.arange(VOCAB) // 32 == 1, -np.inf, logits[2]))
    np.testing.assert_allclose(normalizers, np.log(np.exp(logits.astype(np.float64)).sum(-1)), rtol=1e-5)


def test_the_device_goes_on_as_if_loaded_anew(rng):
    """Sampled tokens, of some slots, one by one: the state is that of a row loaded with all of them. That is what makes
    a preemption unseen."""
    params = SamplingParams(**EACH["all"])
    sequences = {slot: rng.integers(0, VOCAB, 30).tolist() for slot in range(SLOTS)}
    state = loaded({slot: (params, tokens[:12], 10) for slot, tokens in sequences.items()})
    for at in range(12, 30):
        slots = np.array([2, 0, 1, SLOTS], np.int32)
        sampled = np.array([True, at < 20, False, False])
        tokens = np.array([sequences.get(int(slot), sequences[0])[at] for slot in slots], np.int32)
        state = record(state, slots, tokens, sampled)
    anew = loaded({slot: (params, sequences[slot][:end], 10) for slot, end in ((2, 30), (0, 20), (1, 12))})
    for got, expected in zip(state, anew, strict=True):
        np.testing.assert_array_equal(got[:SLOTS], expected[:SLOTS])


def test_a_long_sequence_is_loaded_in_pieces(rng):
    tokens = rng.integers(0, VOCAB // 2, 2 * options.LOADED_AT_ONCE + 100).tolist()
    split = options.LOADED_AT_ONCE + 50
    params = SamplingParams(presence_penalty=0.1, allowed_token_ids=tuple(range(0, VOCAB, 3)))
    state = loaded({1: (params, tokens, split)})
    seen = np.asarray(state.seen[1])
    np.testing.assert_array_equal(seen & 0x7FFF, np.bincount(tokens[split:], minlength=VOCAB))
    np.testing.assert_array_equal(seen < 0, np.isin(np.arange(VOCAB), tokens[:split]))
    bits = np.unpackbits(np.asarray(state.allowed[1]).view(np.uint8), bitorder="little")[:VOCAB]
    np.testing.assert_array_equal(bits.nonzero()[0], params.allowed_token_ids)


def test_counts_do_not_overflow():
    params = SamplingParams(frequency_penalty=0.5)
    state = loaded({0: (params, [3] * 40_000, 1)})
    assert int(state.seen[0, 3]) == -1, "all bits of the count, and the prompt's"
    state = record(state, np.zeros(1, np.int32), np.full(1, 3, np.int32), np.ones(1, bool))
    assert int(state.seen[0, 3]) == -1
