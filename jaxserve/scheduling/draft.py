"""A step in the making."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from jaxserve.request import Request
from jaxserve.scheduling.schedule import MAX_CACHED_BLOCKS, PromptWork, RowOptions, RowSampling, Swap


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_rows: int
    """Requests that compute more than one token in the same step."""
    step_sizes: tuple[int, ...] = ()
    """What steps with prompts are padded to, in increasing order; empty: steps are as large as they can be."""
    chunk_tokens: tuple[int, int] = (1, 1 << 30)
    """Prompt tokens of a step in which sequences decode: where few wait and few decode, and where many wait. Only with
    sizes."""


PROMPT_STEPS = 18
"""Over about so many steps the prompt tokens that wait are spread while sequences decode."""
PER_DECODING = 3
"""A step makes room for about so many prompt tokens for each sequence that decodes in it, also where few wait: the
longer it is anyway, the less more of them matter, and the fewer such steps there are."""
MAX_POSTPONED = 4
"""Steps in a row that may leave prompts to later ones."""


class Draft:
    """How many tokens each request computes, and what the step still has room for."""

    def __init__(self, limits: SchedulerLimits, postponed: int = 0) -> None:
        self.counts: dict[Request, int] = {}
        self.budget = limits.max_num_batched_tokens
        self.prefill_rows = limits.max_prefill_rows
        self.postponed = postponed
        """Steps in a row that left prompts to later ones: before this one, and after ``shorten`` with it."""
        self._limits = limits
        self.cached_blocks = MAX_CACHED_BLOCKS
        self.incomplete: list[Request] = []
        """Those whose prompts will not be complete after this step."""
        self.admitted: list[Request] = []
        self.swap_in: list[Swap] = []
        self.queried_tokens = 0
        self.cached_tokens = 0

    def shorten(self, prompt_tokens: int, more: bool) -> None:
        """Leave room for a part of the ``prompt_tokens`` that could be computed now; ``more`` may wait behind them.

        Sequences that decode, which are in already, wait for a step with prompts: the fewer tokens these have, the
        shorter it is. And it should pad little. Where it would, it is of the next smaller size, if that holds most of
        them, and another step computes the rest; or they are postponed for a few steps, in which others may join them:
        a seat that is empty for a step costs less than a tenth of a step of padding.
        """
        sizes, decoding = self._limits.step_sizes, len(self.counts)
        postponed, self.postponed = self.postponed, 0
        if not (sizes and prompt_tokens):
            return
        wanted = prompt_tokens
        if decoding:
            low, high = self._limits.chunk_tokens
            share = max(PER_DECODING * decoding, prompt_tokens // PROMPT_STEPS)
            wanted = min(prompt_tokens, max(low, min(high, share)))
        place = min(bisect_left(sizes, decoding + wanted), len(sizes) - 1)
        padding = sizes[place] - decoding - prompt_tokens
        # Where nobody decodes, another step reads the weights once more: the time of so many tokens.
        if padding > (sizes[place] // 10 if decoding else 2 * sizes[0]):
            if place and sizes[place - 1] - decoding >= max(1, wanted // 2):
                place -= 1
            elif postponed < MAX_POSTPONED and self._others_may_join(decoding, more):
                self.postponed, self.budget = postponed + 1, 0
                return
        self.budget = max(0, min(self.budget, sizes[place] - decoding))

    def _others_may_join(self, decoding: int, more: bool) -> bool:
        """Whether a few steps may bring more prompts: where many decode, some come to an end, and their seats are taken
        by those that wait, or by new ones if the engine is busy. Where steps take whatever prompts there are, as
        offline, no more are expected than wait."""
        limits = self._limits
        many, busy = decoding >= limits.step_sizes[0] // 2, 2 * decoding >= limits.max_num_seqs
        return many and (more or (busy and limits.chunk_tokens[0] < limits.max_num_batched_tokens))

    def size(self, request: Request, wanted: int) -> int:
        """Tokens that a request that wants ``wanted`` can have; 0 if none."""
        count = min(wanted, self.budget)
        return 0 if not self.prefill_rows and is_prefill(request, count) else count

    def put(self, request: Request, count: int) -> None:
        self.counts[request] = count
        self.budget -= count
        self.prefill_rows -= is_prefill(request, count)

    def drop(self, request: Request) -> int:
        """Take a request out; returns the tokens it had."""
        count = self.counts.pop(request, 0)
        if count:
            self.budget += count
            self.prefill_rows += is_prefill(request, count)
        return count


def is_prefill(request: Request, count: int) -> bool:
    """Whether a request needs a prefill row: for several tokens, to take its slot, or for prompt work."""
    return count > 1 or request.num_device_blocks == 0 or request.num_computed_tokens < request.examined_until


def wanted_tokens(request: Request) -> int:
    """Tokens the request could compute now; none if the last token it may have is already in flight."""
    known = len(request.token_ids) + request.num_in_flight
    # Without a token in flight it is the prompt that is as long as the request may be.
    return 0 if request.num_in_flight and known >= request.length_limit else known - request.num_computed_tokens


def take_prompt_work(request: Request, start: int, end: int) -> PromptWork | None:
    """What is to be seen of the tokens from ``start`` to ``end`` that no step has looked at yet."""
    first, end = max(start, request.num_examined_tokens), min(end, request.examined_until)
    if first >= end:
        return None
    request.num_examined_tokens = end
    targets = request.token_ids[first + 1 : end + 1] if request.pooling is None else None
    return PromptWork(first - start, end - first, targets)


def row_sampling(request: Request) -> RowSampling:
    """What a slot must know of the request that takes it."""
    options = None
    if request.has_options:
        options = RowOptions(list(request.token_ids), request.prompt_len, request.stop_ids)
    return RowSampling(request.sampling, request.seed, request.choice_index, options)
