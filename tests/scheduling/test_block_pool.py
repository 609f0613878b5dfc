from __future__ import annotations

from collections import Counter

import pytest

from jaxserve.scheduling.block_pool import BlockPool


def test_block_zero_is_never_handed_out_and_a_request_too_large_changes_nothing():
    pool = BlockPool(5)
    assert pool.allocate(5) is None and pool.num_free == 4
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4] and pool.num_free == 0
    assert pool.allocate(0) == []


def test_released_blocks_are_handed_out_again():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks
    pool.release(blocks)
    pool.check_integrity(Counter())
    assert sorted(pool.allocate(2) or []) == sorted(blocks)


def test_integrity_catches_what_would_corrupt_a_cache():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks
    pool.check_integrity(Counter(blocks))
    with pytest.raises(AssertionError, match="owners"):
        pool.check_integrity(Counter())  # lost
    with pytest.raises(AssertionError, match="owners"):
        pool.check_integrity(Counter(blocks * 2))  # given away twice
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks[:1])


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)
