"""The batch on host and device, and the only padding in the tree.

A step's whole host input is one int32 vector, laid out by its bucket alone and uploaded once; a step can be replayed
from it. What lives longer, block tables, sampling parameters and last tokens, stays on the device in ``BatchState``, a
row a slot, and receives from the vector what is new.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.models.attention import AttentionInputs
from jaxserve.runner.buckets import Bucket
from jaxserve.scheduling.schedule import MAX_CACHED_BLOCKS, RowSampling, SchedulerOutput
from pallas_kernels.sampling import SamplingRows

Array = jax.Array

SAMPLING_WORDS = 8
NOWHERE = np.iinfo(np.int32).max
"""A row that no array has: what is to be written there is dropped."""
HAS_OPTIONS = 7
"""The sampling word that says whether the slot has optional state."""


class BatchState(NamedTuple):
    """Device-resident state of all slots; the last row is nobody's and serves padding (its block table is zero)."""

    block_tables: Array  # int32 [1, slots + 1, M]; the first axis is the KV cache group
    last_tokens: Array  # int32 [slots + 1], sampled by each slot's latest step
    sampling: Array  # int32 [slots + 1, SAMPLING_WORDS], floats by their bits
    hidden: Array  # [max_num_batched_tokens, D], of the latest mixed step's tokens before the last layer, or after it

    def sampling_rows(self, slots: Array) -> SamplingRows:
        words = self.sampling[slots]
        floats = lax.bitcast_convert_type(words[:, :3], jnp.float32)
        return SamplingRows(
            floats[:, 0], floats[:, 1], floats[:, 2], words[:, 3], seeds=words[:, 4:6], choices=words[:, 6]
        )


def state_shapes(slots: int, table_width: int, hidden: jax.ShapeDtypeStruct) -> BatchState:
    """The state's arrays without memory behind them."""
    shapes = ((1, slots + 1, table_width), (slots + 1,), (slots + 1, SAMPLING_WORDS))
    tables, last_tokens, sampling = (jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes)
    return BatchState(tables, last_tokens, sampling, hidden)  # type: ignore[arg-type]


class _Layout(NamedTuple):
    """The parts of a bucket's vector: R rows, decoding ones first, P of them at most prefill rows, T tokens."""

    slots: slice  # [R]
    seq_lens: slice  # [R]
    samples: slice  # [R] whether the last token's logits choose the next
    appended: slice  # [R] the block that a decoding row goes on in, or -1
    query_start_loc: slice  # [P + 1] where prefill rows start among the tokens: first the number of decoding rows
    sampling: slice  # [P, 1 + SAMPLING_WORDS] whether the row takes its slot now, and its sampling words
    placed: slice  # [3, U] new blocks of prefill rows: row of the state (out of range: nothing), column, block
    token_ids: slice  # [T]

    @classmethod
    def of(cls, bucket: Bucket, block_size: int) -> _Layout:
        rows, prefill = bucket.rows, bucket.prefill_rows
        updates = bucket.tokens // block_size + prefill + MAX_CACHED_BLOCKS if prefill else 0
        sizes = (rows, rows, rows, rows, prefill + 1, prefill * (1 + SAMPLING_WORDS), 3 * updates, bucket.tokens)
        ends = np.cumsum(sizes).tolist()
        return cls(*(slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)))


def packed_size(bucket: Bucket, block_size: int) -> int:
    """int32 words of a bucket's vector."""
    return _Layout.of(bucket, block_size).token_ids.stop


def pack(schedule: SchedulerOutput, bucket: Bucket, block_size: int, null_slot: int) -> np.ndarray:
    """The step's input vector. Padding rows have the null slot and length 0, padding tokens id 0."""
    layout = _Layout.of(bucket, block_size)
    packed = np.zeros(layout.token_ids.stop, np.int32)
    slots, seq_lens, samples, appended, starts, sampling, placed, tokens = (packed[part] for part in layout)
    count, rows = len(schedule.decode), schedule.rows
    slots.fill(null_slot)
    slots[: len(rows)] = [row.slot for row in rows]
    seq_lens[: len(rows)] = [row.seq_len for row in rows]
    samples[: len(rows)] = [row.samples for row in rows]
    appended.fill(-1)
    appended[:count] = [row.new_blocks[0] if row.new_blocks else -1 for row in schedule.decode]
    starts.fill(count)
    tokens[:count] = [row.token_ids[0] for row in schedule.decode]
    if schedule.prefill:
        _pack_prefill(schedule, block_size, (starts, sampling, placed, tokens))
    else:
        placed.reshape(3, -1)[0].fill(NOWHERE)
    return packed


def _pack_prefill(schedule: SchedulerOutput, block_size: int, parts: tuple[np.ndarray, ...]) -> None:
    starts, sampling, placed, tokens = parts
    words = sampling.reshape(-1, 1 + SAMPLING_WORDS)
    updates = placed.reshape(3, -1)
    updates[0].fill(NOWHERE)
    start, filled = len(schedule.decode), 0
    for row, item in enumerate(schedule.prefill):
        end = start + len(item.token_ids)
        tokens[start:end] = item.token_ids
        starts[row + 1 :] = start = end
        if item.sampling is not None:
            words[row, 0] = 1
            words[row, 1:] = sampling_words(item.sampling)
        count, last = len(item.new_blocks), (item.seq_len - 1) // block_size
        new = updates[:, filled : filled + count]
        new[0], new[1], new[2] = item.slot, range(last + 1 - count, last + 1), item.new_blocks
        filled += count


def sampling_words(row: RowSampling) -> np.ndarray:
    """A slot's row of ``BatchState.sampling``."""
    words = np.zeros(SAMPLING_WORDS, np.int32)
    params = row.params
    words[:3] = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    words[3] = params.top_k
    words[4:6] = np.array([row.seed], np.int64).view(np.int32)  # little endian: low word first
    words[6] = row.choice_index
    words[HAS_OPTIONS] = params.has_options
    return words


class StepInputs(NamedTuple):
    """A step as the model sees it."""

    token_ids: Array  # [T]
    attention: AttentionInputs
    rows: Array  # [3, R] slots, sequence lengths and whether the row samples, for the sampler


def unpack(packed: Array, state: BatchState, bucket: Bucket, block_size: int) -> tuple[StepInputs, BatchState]:
    """Inside a program: the inputs of a step, from its vector and the state, and the state with what is new.

    Positions, cache places and lengths are derived here, so that nothing but the vector crosses from the host.
    """
    parts = _Layout.of(bucket, block_size)
    slots, seq_lens, starts = packed[parts.slots], packed[parts.seq_lens], packed[parts.query_start_loc]
    decoding, prefill = starts[0], bucket.prefill_rows
    null_slot = state.last_tokens.shape[0] - 1
    # The rows behind the decoding ones: as many as may prefill, some of them perhaps nobody's.
    prefill_slots = lax.dynamic_slice_in_dim(jnp.pad(slots, (0, prefill), constant_values=null_slot), decoding, prefill)
    prefill_lens = lax.dynamic_slice_in_dim(jnp.pad(seq_lens, (0, prefill)), decoding, prefill)
    state = _update(packed, parts, state, prefill_slots, block_size)
    tables = state.block_tables[0]

    index = jnp.arange(bucket.tokens)
    own_row = jnp.minimum(index, bucket.rows - 1)  # a decoding row's token stands where the row does
    tokens = packed[parts.token_ids]
    token_ids = jnp.where(tokens < 0, state.last_tokens[slots[own_row]], tokens)
    token_slots, positions = slots[own_row], seq_lens[own_row] - 1
    if prefill:
        # Beyond the last row for padding. compare_all, since the default is a loop, which no CUDA graph takes in.
        owner = jnp.searchsorted(starts[1:], index, side="right", method="compare_all")
        owner = jnp.minimum(owner, prefill - 1)
        first = prefill_lens - (starts[1:] - starts[:-1])
        token_slots = jnp.where(index < decoding, token_slots, prefill_slots[owner])
        positions = jnp.where(index < decoding, positions, first[owner] + index - starts[owner])
    real = index < starts[-1]
    positions = jnp.where(real, positions, 0)
    blocks = tables[token_slots, positions // block_size]
    slot_mapping = jnp.where(real, blocks * block_size, 0) + positions % block_size

    row = jnp.arange(bucket.rows)
    last = starts[jnp.clip(row - decoding + 1, 0, prefill)] - 1
    attention = AttentionInputs(
        positions,
        slot_mapping,
        last=jnp.where(row < decoding, row, jnp.maximum(last, 0)),
        block_tables=tables[slots],
        seq_lens=seq_lens,
        decode_seq_lens=jnp.where(row < decoding, seq_lens, 0),
        prefill_block_tables=tables[prefill_slots],
        prefill_seq_lens=prefill_lens,
        query_start_loc=starts,
    )
    return StepInputs(token_ids, attention, jnp.stack([slots, seq_lens, packed[parts.samples]])), state


def _update(packed: Array, parts: _Layout, state: BatchState, prefill_slots: Array, block_size: int) -> BatchState:
    """The state with new blocks and, where requests take their slots, their sampling words. What is not to be written
    is given an index out of range; negative ones would wrap, also with mode="drop"."""
    tables, sampling, appended = state.block_tables, state.sampling, packed[parts.appended]
    column = jnp.where(appended < 0, tables.shape[2], (packed[parts.seq_lens] - 1) // block_size)
    tables = tables.at[0, packed[parts.slots], column].set(appended, mode="drop")
    if prefill_slots.shape[0]:
        row, column, block = packed[parts.placed].reshape(3, -1)
        tables = tables.at[0, row, column].set(block, mode="drop")
        words = packed[parts.sampling].reshape(-1, 1 + SAMPLING_WORDS)
        taken = jnp.where(words[:, 0] == 1, prefill_slots, sampling.shape[0])
        sampling = sampling.at[taken].set(words[:, 1:], mode="drop")
    return state._replace(block_tables=tables, sampling=sampling)
