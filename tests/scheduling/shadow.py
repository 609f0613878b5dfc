"""A device without numbers: its cache holds, for each place, which sequence of tokens was computed there.

It does what the runner does with a step, in the same order, and checks that every row finds in its blocks exactly what
was computed for its own tokens. A sampled token depends on the whole sequence, so that two runs can be compared.
"""

from __future__ import annotations

from jaxserve.request import Request
from jaxserve.scheduling.schedule import DEVICE_TOKEN, ScheduledRequest, SchedulerOutput, Swap
from jaxserve.scheduling.scheduler import Scheduler

VOCABULARY = 50


def next_token(sequence: list[int]) -> int:
    return 10 + hash(tuple(sequence)) % VOCABULARY


def lone_answer(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request gets that runs alone."""
    sequence = list(prompt)
    for _ in range(max_tokens):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class ShadowDevice:
    """Executes the steps of one scheduler, at once and in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        kv = scheduler.kv
        self._scheduler = scheduler
        self._block_size = kv.block_size
        self._window = kv.window
        self._cache: list[list[int]] = [[0] * kv.block_size for _ in range(kv.pool.num_blocks)]
        self._tables: dict[int, list[int]] = {}
        """By slot."""
        self._sequences: dict[int, list[int]] = {}
        """Tokens by slot, those included that only the device knows."""
        self._swapped: dict[str, list[list[int]]] = {}

    def execute(self, step: SchedulerOutput) -> list[list[int]]:
        """The tokens that each row samples, none or one."""
        for swap in step.swap_out:
            assert self._scheduler.get(swap.request_id), "blocks of a request that has ended are kept"
            self._swapped[swap.request_id] = [list(self._cache[block]) for block in swap.block_ids]
        for swap in step.swap_in:
            self._swap_in(swap)
        return [self._compute(row) for row in step.rows]

    def _swap_in(self, swap: Swap) -> None:
        contents = self._swapped.pop(swap.request_id)
        assert len(contents) == len(swap.block_ids)
        for block, content in zip(swap.block_ids, contents, strict=True):
            self._cache[block] = content

    def _compute(self, row: ScheduledRequest) -> list[int]:
        request = self._scheduler.get(row.request_id)
        assert request is not None
        assert row.token_ids, "logits come from a token that is computed"
        self._update_table(row, request)
        sequence, table = self._sequences[row.slot], self._tables[row.slot]
        if row.token_ids == [DEVICE_TOKEN]:
            assert row.seq_len == len(sequence)
        first = row.seq_len - len(row.token_ids)
        chain = _chain(sequence[: row.seq_len])
        seen_from = 0 if self._window is None else max(first + 1 - self._window, 0)
        for place in range(seen_from, first):
            block, offset = table[place // self._block_size], place % self._block_size
            found = block and self._cache[block][offset]
            assert found == chain[place], f"{row.request_id} reads another's block {block}"
        for place in range(first, row.seq_len):
            block, offset = table[place // self._block_size], place % self._block_size
            assert block, f"{row.request_id} writes to block 0"
            self._cache[block][offset] = chain[place]
        if not row.samples:
            return []
        sequence.append(next_token(sequence))
        return sequence[-1:]

    def _update_table(self, row: ScheduledRequest, request: Request) -> None:
        if row.sampling is not None:
            self._tables[row.slot] = []
            self._sequences[row.slot] = list(request.token_ids)
        table = self._tables[row.slot]
        table += row.new_blocks
        assert len(table) == -(-row.seq_len // self._block_size), "the table does not end with this step's last token"


def _chain(sequence: list[int]) -> list[int]:
    """For each place, a number that stands for all tokens up to it."""
    values, value = [], 1
    for token in sequence:
        value = hash((value, token))
        values.append(value)
    return values
