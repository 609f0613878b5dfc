"""One int32 vector a step: what the device makes of it, against the scheduled requests read plainly."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from jaxserve.request import SamplingParams
from jaxserve.runner.batch import BatchState, StepInputs, pack, packed_size, state_shapes, unpack
from jaxserve.runner.buckets import Bucket
from jaxserve.scheduling.schedule import DEVICE_TOKEN, RowSampling, ScheduledRequest, SchedulerOutput

SLOTS, BLOCK, WIDTH = 6, 8, 5
LAST_TOKENS = [900, 901, 902, 903, 904, 905, 0]

unpack_jit = jax.jit(unpack, static_argnames=("bucket", "block_size"))


def request(slot, token_ids, seq_len, *, new_blocks=(), sampling=None, samples=True) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=f"in slot {slot}",
        slot=slot,
        token_ids=list(token_ids),
        seq_len=seq_len,
        samples=samples,
        new_blocks=list(new_blocks),
        wants_logprobs=False,
        sampling=sampling,
    )


def table(slot: int) -> list[int]:
    """What stands in a slot's block table before the step."""
    return [10 * slot + 1 + column for column in range(WIDTH)]


def make_state() -> BatchState:
    hidden = jax.ShapeDtypeStruct((1, 1), np.float32)
    tables, _, sampling, hidden = (np.zeros(part.shape, part.dtype) for part in state_shapes(SLOTS, WIDTH, hidden))
    tables[0, :SLOTS] = [table(slot) for slot in range(SLOTS)]
    sampling[:SLOTS] = 99
    return BatchState(tables, np.array(LAST_TOKENS, np.int32), sampling, hidden)


def run(decode, prefill, bucket: Bucket) -> tuple[StepInputs, BatchState]:
    """A step's inputs, and the state after it."""
    packed = pack(SchedulerOutput(decode=decode, prefill=prefill), bucket, BLOCK, null_slot=SLOTS)
    assert packed.dtype == np.int32 and packed.shape == (packed_size(bucket, BLOCK),)
    return jax.tree.map(np.asarray, unpack_jit(packed, make_state(), bucket=bucket, block_size=BLOCK))


def check(decode, prefill, bucket: Bucket) -> None:
    """Every field of ``StepInputs``, of real tokens and rows and of padding."""
    inputs, _ = run(decode, prefill, bucket)
    at = inputs.attention
    for index, item in enumerate(decode):
        token = LAST_TOKENS[item.slot] if item.token_ids[0] == DEVICE_TOKEN else item.token_ids[0]
        _check_token(inputs, index, item.slot, token, item.seq_len - 1)
        assert at.decode_seq_lens[index] == at.seq_lens[index] == item.seq_len
        assert at.block_tables[index].tolist() == table(item.slot)
        assert at.last[index] == index
        assert inputs.rows[:, index].tolist() == [item.slot, item.seq_len, item.samples]
    start = len(decode)
    for row, item in enumerate(prefill):
        first = item.seq_len - len(item.token_ids)
        for offset, token in enumerate(item.token_ids):
            _check_token(inputs, start + offset, item.slot, token, first + offset)
        assert at.query_start_loc[row] == start
        start += len(item.token_ids)
        place = len(decode) + row
        assert at.prefill_seq_lens[row] == item.seq_len
        assert at.prefill_block_tables[row].tolist() == table(item.slot)
        assert at.seq_lens[place] == item.seq_len
        assert at.block_tables[place].tolist() == table(item.slot)
        assert at.last[place] == start - 1, "the last token of the chunk"
        assert inputs.rows[:, place].tolist() == [item.slot, item.seq_len, item.samples]
    assert (at.query_start_loc[len(prefill) :] == start).all()

    assert (at.slot_mapping[start:] < BLOCK).all(), "padding writes into block 0"
    assert not at.positions[start:].any() and not inputs.token_ids[start:].any()
    assert not at.decode_seq_lens[len(decode) :].any()
    assert not at.prefill_seq_lens[len(prefill) :].any() and not at.prefill_block_tables[len(prefill) :].any()
    count = len(decode) + len(prefill)
    assert not at.block_tables[count:].any() and not at.seq_lens[count:].any()
    assert (inputs.rows[0, count:] == SLOTS).all() and not inputs.rows[1:, count:].any()
    assert at.last.shape == (bucket.rows,)
    assert (at.last >= 0).all() and (at.last < bucket.tokens).all()


def _check_token(inputs: StepInputs, index: int, slot: int, token: int, position: int) -> None:
    assert inputs.token_ids[index] == token
    assert inputs.attention.positions[index] == position
    assert inputs.attention.slot_mapping[index] == table(slot)[position // BLOCK] * BLOCK + position % BLOCK


DECODE = [request(3, [50], 1), request(0, [51], 8), request(5, [52], 9), request(1, [DEVICE_TOKEN], 40)]
WHOLE = request(2, range(60, 73), 13)
CHUNK = request(4, range(80, 87), 23, samples=False)  # tokens 16 to 22
SINGLE = request(1, [90], 1)


@pytest.mark.parametrize(
    ("decode", "prefill", "bucket"),
    [
        pytest.param(DECODE, [], Bucket(4, 4, 0), id="decode"),
        pytest.param(DECODE[:3], [], Bucket(6, 6, 0), id="decode, padded"),
        pytest.param([], [WHOLE], Bucket(13, 6, 1), id="prompt"),
        pytest.param([], [SINGLE, WHOLE, CHUNK], Bucket(32, 6, 4), id="prompts, padded"),
        pytest.param(DECODE, [CHUNK, WHOLE], Bucket(24, 6, 2), id="mixed"),
        pytest.param(DECODE[:2], [WHOLE, CHUNK], Bucket(38, 6, 4), id="mixed, padded"),
        pytest.param(DECODE, [WHOLE, CHUNK], Bucket(36, 6, 2), id="mixed, tokens padded, but no rows"),
        pytest.param(DECODE, [CHUNK], Bucket(40, 5, 5), id="room for more prompts than rows are left"),
        pytest.param([], [], Bucket(2, 2, 0), id="only padding"),
        pytest.param([], [], Bucket(16, 4, 2), id="only padding, mixed"),
    ],
)
def test_what_the_device_sees(decode, prefill, bucket):
    check(decode, prefill, bucket)


def test_a_step_without_news_leaves_the_state():
    _, after = run(DECODE[:2], [CHUNK], Bucket(16, 6, 2))
    for part, before in zip(after, make_state(), strict=True):
        np.testing.assert_array_equal(part, before)


def test_a_block_appended_to_a_decoding_row():
    """It counts in this very step and stays; rows without one, and padding, change nothing."""
    inputs, after = run([request(1, [7], 17, new_blocks=[77]), request(3, [8], 24)], [], Bucket(4, 4, 0))
    assert inputs.attention.slot_mapping[:2].tolist() == [77 * BLOCK, table(3)[2] * BLOCK + 7]
    assert inputs.attention.block_tables[0].tolist() == [11, 12, 77, 14, 15]
    expected = make_state().block_tables
    expected[0, 1, 2] = 77
    np.testing.assert_array_equal(after.block_tables, expected)


def test_blocks_of_prompts():
    """A whole prompt's, a later chunk's and one decoding row's, all in one step."""
    grows = request(5, [7], 33, new_blocks=[79])
    whole = request(2, range(60, 73), 13, new_blocks=[70, 71])
    chunk = request(4, range(80, 87), 23, new_blocks=[75])
    inputs, after = run([grows], [whole, chunk], Bucket(32, 6, 4))
    expected = make_state().block_tables
    expected[0, 5, 4], expected[0, 2, :2], expected[0, 4, 2] = 79, [70, 71], 75
    np.testing.assert_array_equal(after.block_tables, expected)
    whole_at = [70 * BLOCK + i for i in range(8)] + [71 * BLOCK + i for i in range(5)]
    assert inputs.attention.slot_mapping[1 : 1 + 13].tolist() == whole_at
    assert inputs.attention.slot_mapping[14 : 14 + 7].tolist() == [75 * BLOCK + i for i in range(7)]
    np.testing.assert_array_equal(inputs.attention.prefill_block_tables[:2], expected[0, [2, 4]])


def test_the_vector_has_room_for_the_blocks_of_any_chunks():
    """Two chunks that fill a bucket, from every offset within a block, however the tokens are shared out."""
    bucket = Bucket(2 * BLOCK + 2, 6, 2)  # two of BLOCK + 1 tokens need four blocks
    for offsets in itertools.product(range(BLOCK), repeat=2):
        for share in range(1, bucket.tokens):
            items, counts = [], (share, bucket.tokens - share)
            for slot, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
                new = -(-(offset + count) // BLOCK) - (offset > 0)
                items.append(request(slot, [1] * count, offset + count, new_blocks=[50 + slot] * new))
            pack(SchedulerOutput(prefill=items), bucket, BLOCK, null_slot=SLOTS)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 5 << 32])
def test_sampling_parameters_arrive_bit_for_bit(seed):
    """Of the request that takes its slot in this step; the others keep theirs."""
    params = SamplingParams(temperature=0.7, top_p=0.1, min_p=0.05, top_k=-1)
    taking = request(3, [1, 2], 2, sampling=RowSampling(params, seed, choice_index=4))
    _, after = run([], [WHOLE, taking], Bucket(32, 6, 4))
    rows = after.sampling_rows(np.array([3]))
    floats = [np.asarray(part)[0] for part in (rows.temperature, rows.top_p, rows.min_p)]
    assert floats == [np.float32(0.7), np.float32(0.1), np.float32(0.05)]
    assert rows.top_k[0] == -1 and rows.choices[0] == 4
    assert np.asarray(rows.seeds[0]).view(np.int64) == seed, "low word first"
    others = np.arange(SLOTS + 1) != 3
    np.testing.assert_array_equal(after.sampling[others], make_state().sampling[others])


def test_cached_blocks_come_along_to_a_slot_however_few_tokens_the_bucket_has():
    """More blocks than the bucket's tokens could fill, for every row of it."""
    bucket = Bucket(2, 8, 4)
    tables = {slot: [50 + WIDTH * slot + column for column in range(WIDTH)] for slot in range(4)}
    prefill = [
        request(slot, [5], WIDTH * BLOCK, new_blocks=blocks, sampling=RowSampling(SamplingParams(), 0, 0))
        for slot, blocks in tables.items()
    ]
    inputs, state = run([], prefill, bucket)
    for slot, blocks in tables.items():
        assert state.block_tables[0, slot].tolist() == inputs.attention.prefill_block_tables[slot].tolist() == blocks
