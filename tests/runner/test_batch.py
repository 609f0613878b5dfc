"""One int32 vector a step: what the device makes of it, against the scheduled requests read plainly."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.request import SamplingParams
from jaxserve.runner.batch import (
    UPDATE_ROWS,
    BatchState,
    StepInputs,
    apply_row_updates,
    pack,
    pack_row_updates,
    packed_size,
    unpack,
)
from jaxserve.runner.buckets import Bucket
from jaxserve.scheduling.schedule import DEVICE_TOKEN, RowSampling, ScheduledRequest

SLOTS, BLOCK, WIDTH = 6, 8, 5
LAST_TOKENS = [900, 901, 902, 903, 904, 905, 0]

unpack_jit = jax.jit(unpack, static_argnames=("bucket", "block_size"))


def request(slot, token_ids, seq_len, *, block_ids=None, new_block=None, sampling=None) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=f"in slot {slot}",
        slot=slot,
        token_ids=tuple(token_ids),
        seq_len=seq_len,
        samples=True,
        block_ids=block_ids,
        new_block=new_block,
        wants_logprobs=False,
        sampling=sampling,
    )


def make_state() -> BatchState:
    """Slot s holds blocks 10 s + 1, 10 s + 2, …; the last row is nobody's."""
    state = BatchState.zeros(SLOTS, WIDTH)
    tables = 10 * np.arange(SLOTS)[:, None] + 1 + np.arange(WIDTH)
    state.block_tables[0, :SLOTS] = tables
    return state._replace(last_tokens=np.array(LAST_TOKENS, np.int32))


def run(decode, prefill, bucket: Bucket, state: BatchState | None = None) -> tuple[StepInputs, BatchState]:
    packed = pack(decode, prefill, bucket, null_slot=SLOTS)
    assert packed.dtype == np.int32 and packed.shape == (packed_size(bucket),)
    return jax.tree.map(np.asarray, unpack_jit(packed, state or make_state(), bucket=bucket, block_size=BLOCK))


def check(decode, prefill, bucket: Bucket) -> None:
    """Every field of ``StepInputs``, of real tokens and rows and of padding."""
    inputs, _ = run(decode, prefill, bucket)
    at = inputs.attention
    for index, item in enumerate(decode):
        token = LAST_TOKENS[item.slot] if item.token_ids[0] == DEVICE_TOKEN else item.token_ids[0]
        _check_token(inputs, index, item.slot, token, item.seq_len - 1)
        assert at.decode_seq_lens[index] == item.seq_len
        assert at.decode_block_tables[index].tolist() == [10 * item.slot + 1 + i for i in range(WIDTH)]
        assert inputs.wanted[index] == index and inputs.rows[:, index].tolist() == [item.slot, item.seq_len]
    start = 0
    for row, item in enumerate(prefill):
        first = item.seq_len - len(item.token_ids)
        for offset, token in enumerate(item.token_ids):
            _check_token(inputs, bucket.decode_rows + start + offset, item.slot, token, first + offset)
        assert at.query_start_loc[row] == start
        start += len(item.token_ids)
        place = bucket.decode_rows + row
        assert at.prefill_seq_lens[row] == item.seq_len
        assert at.prefill_block_tables[row].tolist() == [10 * item.slot + 1 + i for i in range(WIDTH)]
        assert inputs.wanted[place] == bucket.decode_rows + start - 1, "the last token of the chunk"
        assert inputs.rows[:, place].tolist() == [item.slot, item.seq_len]
    assert (at.query_start_loc[len(prefill) :] == start).all()

    real_tokens = np.r_[: len(decode), bucket.decode_rows : bucket.decode_rows + start].astype(int)
    padding = np.setdiff1d(np.arange(bucket.tokens), real_tokens)
    assert (at.slot_mapping[padding] < BLOCK).all(), "padding writes into block 0"
    assert not at.positions[padding].any() and not inputs.token_ids[padding].any()
    assert not at.decode_seq_lens[len(decode) :].any() and not at.decode_block_tables[len(decode) :].any()
    assert not at.prefill_seq_lens[len(prefill) :].any() and not at.prefill_block_tables[len(prefill) :].any()
    real_rows = np.r_[: len(decode), bucket.decode_rows : bucket.decode_rows + len(prefill)].astype(int)
    padding = np.setdiff1d(np.arange(bucket.rows), real_rows)
    assert (inputs.rows[0, padding] == SLOTS).all() and not inputs.rows[1, padding].any()
    assert inputs.wanted.shape == (bucket.rows,) and (inputs.wanted < bucket.tokens).all()


def _check_token(inputs: StepInputs, index: int, slot: int, token: int, position: int) -> None:
    block = 10 * slot + 1 + position // BLOCK
    assert inputs.token_ids[index] == token
    assert inputs.attention.positions[index] == position
    assert inputs.attention.slot_mapping[index] == block * BLOCK + position % BLOCK


DECODE = [request(3, [50], 1), request(0, [51], 8), request(5, [52], 9), request(1, [DEVICE_TOKEN], 40)]
WHOLE = request(2, range(60, 73), 13)
CHUNK = request(4, range(80, 87), 23)  # tokens 16 to 22


@pytest.mark.parametrize(
    ("decode", "prefill", "bucket"),
    [
        pytest.param(DECODE, [], Bucket(4, 0, 0), id="decode"),
        pytest.param(DECODE[:3], [], Bucket(6, 0, 0), id="decode, padded"),
        pytest.param([], [WHOLE], Bucket(0, 13, 1), id="prompt"),
        pytest.param([], [WHOLE, CHUNK], Bucket(0, 32, 4), id="prompts, padded"),
        pytest.param(DECODE, [CHUNK, WHOLE], Bucket(4, 20, 2), id="mixed"),
        pytest.param(DECODE[:2], [WHOLE, CHUNK], Bucket(6, 32, 4), id="mixed, padded"),
        pytest.param([], [CHUNK], Bucket(6, 16, 2), id="no decode in a mixed bucket"),
        pytest.param([], [], Bucket(2, 0, 0), id="only padding"),
        pytest.param([], [], Bucket(2, 16, 2), id="only padding, mixed"),
    ],
)
def test_what_the_device_sees(decode, prefill, bucket):
    check(decode, prefill, bucket)


def test_appended_blocks():
    """A decoding row that crosses into a new block brings it along: it counts in this very step, and stays."""
    grown, plain = request(1, [7], 17, new_block=77), request(3, [8], 24)
    state = make_state()
    state.block_tables[0, 1, 2:] = 0
    inputs, after = run([grown, plain], [], Bucket(4, 0, 0), state)
    assert inputs.attention.slot_mapping[:2].tolist() == [77 * BLOCK, 33 * BLOCK + 7]
    assert inputs.attention.decode_block_tables[0].tolist() == [11, 12, 77, 0, 0]
    expected = state.block_tables.copy()
    expected[0, 1, 2] = 77
    np.testing.assert_array_equal(after.block_tables, expected)  # rows of padding and of others are untouched


def make_update(slot: int, blocks=(4, 5), sampling: RowSampling | None = None) -> ScheduledRequest:
    return request(slot, [1, 2], 2, block_ids=tuple(blocks), sampling=sampling)


def updated(state: BatchState, items: list[ScheduledRequest]) -> BatchState:
    rows = pack_row_updates(items, WIDTH, unused_slot=SLOTS + 1)
    assert rows.shape[0] == UPDATE_ROWS
    return jax.tree.map(np.asarray, apply_row_updates(jax.tree.map(np.array, state), rows))


def test_row_updates_rewrite_their_rows_and_no_other():
    """Padding of the call has a slot out of range, which must be dropped and not wrap to the last row."""
    before = make_state()
    before.sampling[:] = 99
    after = updated(before, [make_update(2)])
    expected = before.block_tables.copy()
    expected[0, 2] = [4, 5, 0, 0, 0]  # what stood behind the new blocks is gone
    np.testing.assert_array_equal(after.block_tables, expected)
    np.testing.assert_array_equal(after.sampling, before.sampling)
    np.testing.assert_array_equal(after.last_tokens, before.last_tokens)


def test_every_slot_at_once():
    after = updated(make_state(), [make_update(slot, [slot + 40]) for slot in range(SLOTS)])
    assert after.block_tables[0, :, 0].tolist() == [40, 41, 42, 43, 44, 45, 0], "nobody's row points to block 0"


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 5 << 32])
def test_sampling_parameters_arrive_bit_for_bit(seed):
    params = SamplingParams(temperature=0.7, top_p=0.1, min_p=0.05, top_k=-1)
    after = updated(make_state(), [make_update(3, sampling=RowSampling(params, seed, choice_index=4))])
    rows = after.sampling_rows(np.array([3, 0, SLOTS]))
    floats = [np.asarray(part)[0] for part in (rows.temperature, rows.top_p, rows.min_p)]
    assert floats == [np.float32(0.7), np.float32(0.1), np.float32(0.05)]
    assert rows.top_k[0] == -1 and rows.choices[0] == 4
    assert np.asarray(rows.seeds[0]).view(np.int64) == seed, "low word first"
    assert not np.asarray(rows.seeds[1:]).any(), "other rows keep theirs"


def test_an_update_without_sampling_leaves_the_parameters():
    """A prompt's next chunk brings blocks alone."""
    params = RowSampling(SamplingParams(temperature=0.25), seed=11, choice_index=1)
    first = updated(make_state(), [make_update(3, sampling=params)])
    second = updated(first, [make_update(3, [4, 5, 6])])
    np.testing.assert_array_equal(second.sampling, first.sampling)
    assert second.block_tables[0, 3].tolist() == [4, 5, 6, 0, 0]
