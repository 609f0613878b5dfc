"""Which request computes how many tokens in the next step.

There is no prefill or decode phase: a request wants ``num_tokens - num_computed_tokens`` tokens and the token budget
gives it some. Requests join and leave at any step. When blocks run out, the one of the worst rank (least urgent, then
latest) is preempted: its blocks are freed, and later its tokens are computed again, save those still cached.

Steps may be in flight: submitted and not collected yet. Their sampled tokens count as known (the device has them), and
what they touch is freed only once they are collected.

Why everybody comes to an end: the request of the best rank is never preempted for another one, so it runs to its end,
and then somebody else is the best. Ranks never change, and those of later arrivals are worse sooner or later.
"""

from __future__ import annotations

from typing import Literal

from jaxserve.request import FinishReason, Request, Status
from jaxserve.scheduling.draft import Draft, SchedulerLimits, is_prefill, row_sampling, take_prompt_work, wanted_tokens
from jaxserve.scheduling.integrity import check_integrity
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import DEVICE_TOKEN, MAX_CACHED_BLOCKS, ScheduledRequest, SchedulerOutput, Swap
from jaxserve.scheduling.swap_space import SwapSpace
from jaxserve.scheduling.waiting import WaitingQueue, by_rank

SchedulingPolicy = Literal["fcfs", "priority"]

AGING_SECONDS = 10.0
"""Under the priority policy, a level of priority is worth this much waiting time."""

LOOKAHEAD = 256
"""Waiting requests that may be passed over to admit a later one, which bounds the time that looking for it takes. Held
ones are not looked at."""


class _DrainNeeded(Exception):
    """Blocks must be taken from a request that a step in flight still uses: collect that step first."""


class Scheduler:
    """Owns every request from its arrival until it is finished and its last step was collected."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        policy: SchedulingPolicy = "fcfs",
        swap: SwapSpace | None = None,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.policy = policy
        self.swap = swap
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self._preempted: list[str] = []
        """Since the last step that was scheduled; likewise those of them that are to be swapped out."""
        self._swap_out: list[Swap] = []
        self._postponed = 0
        """See ``Draft``."""
        self._evicted = 0
        """Cached blocks that had given way by then."""

    def __len__(self) -> int:
        """Requests that are not finished, or whose last step is still in flight."""
        return len(self._requests)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``ValueError`` for an id that is in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._requests[request.request_id] = request
        if self.policy == "fcfs":
            request.priority = 0
        # Everybody ages at the same rate, so who goes first never changes: a rank is computed once.
        urgency = request.arrival_time + AGING_SECONDS * request.priority if self.policy == "priority" else 0.0
        request.rank = (urgency, request.arrival_order)
        self.waiting.add(request)

    def why_waiting(self) -> str:
        """Why the head of the queue is not admitted, for a log line."""
        if not self.waiting:
            return "nothing waits"
        request = self.waiting[0]
        needed = self.kv.blocks_for(request.num_tokens)
        return (
            f"{request.request_id} needs {needed} of {self.kv.pool.num_usable} blocks and a slot,"
            f" {self.kv.pool.num_free} blocks and {self.num_free_slots} slots are free,"
            f" {len(self.running)} requests run, {len(self.waiting)} wait"
        )

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can run before a step in flight is collected (or at all)."""
        draft = Draft(self.limits, self._postponed)
        preempted = len(self._preempted)
        try:
            prompts = self._schedule_decoding(draft)
            tokens = sum(map(wanted_tokens, prompts)) + self.waiting.tokens_of_first(self.num_free_slots)
            draft.shorten(tokens, more=len(self.waiting) > self.num_free_slots)
            self._schedule_prompts(draft, prompts)
        except _DrainNeeded:
            return None
        if len(self._preempted) == preempted:
            self._admit_waiting(draft)
        self._spend_rest(draft)
        self._postponed = draft.postponed
        return self._commit(draft) if draft.counts else None

    def _schedule_decoding(self, draft: Draft) -> list[Request]:
        """Requests that want one token come first, so that a long prompt never stalls them; returns the others."""
        prompts = []
        block_size = self.kv.block_size
        for request in tuple(self.running):
            wanted = wanted_tokens(request)
            if wanted > 1 or (wanted and is_prefill(request, wanted)):
                prompts.append(request)
            elif wanted and draft.budget and request.status is Status.RUNNING:
                has_room = request.num_computed_tokens < len(request.block_ids) * block_size
                if has_room or self._make_room(request, 1, draft):
                    draft.put(request, 1)
        return prompts

    def _schedule_prompts(self, draft: Draft, prompts: list[Request]) -> None:
        """The prompt of the best rank may take half of the budget, then those follow that can be completed in this
        step. What the others may take is known when new requests were admitted, so that a short prompt never waits
        behind long ones."""
        prompts.sort(key=by_rank)
        first = prompts[0] if prompts else None
        for request in prompts:
            if request.status is not Status.RUNNING:
                continue
            wanted = wanted_tokens(request)
            share = -(-draft.budget // 2) if request is first else draft.budget
            count = draft.size(request, min(wanted, share))
            if count < wanted:
                draft.incomplete.append(request)
            if count and (count == wanted or request is first) and self._make_room(request, count, draft):
                draft.put(request, count)

    def _spend_rest(self, draft: Draft) -> None:
        """What nobody else could use goes to the prompts that are not complete."""
        for request in sorted(draft.incomplete, key=by_rank):
            if request.status is not Status.RUNNING:
                continue
            before = draft.drop(request)
            count = draft.size(request, wanted_tokens(request))
            if count > before and not self.kv.grow(request, request.num_computed_tokens + count):
                count = before
            if count:
                draft.put(request, count)

    def _make_room(self, request: Request, count: int, draft: Draft) -> bool:
        """Get blocks for the request, preempting if need be; False if the request itself had to go."""
        while not self.kv.grow(request, request.num_computed_tokens + count):
            if any(r.steps_in_flight for r in self._requests.values() if r.status is Status.FINISHED):
                raise _DrainNeeded  # blocks are about to become free
            victim = max(self.running, key=by_rank)
            if victim.steps_in_flight:
                raise _DrainNeeded
            draft.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        held = self.kv.held_blocks(request)
        swap = self.swap
        if swap is not None and swap.pays(len(held), request.num_computed_tokens) and len(held) <= MAX_CACHED_BLOCKS:
            swap.take(len(held))
            request.num_swapped_blocks = len(held)
            self._swap_out.append(Swap(request.request_id, held))
        else:
            request.num_computed_tokens = 0
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.waiting.add(request)
        self._preempted.append(request.request_id)

    def _admit_waiting(self, draft: Draft) -> None:
        """Admit by rank until somebody does not fit."""
        place = passed_over = 0
        while place < len(self.waiting) and passed_over < LOOKAHEAD:
            if not (self._free_slots and draft.budget and draft.prefill_rows):
                return
            request = self.waiting[place]
            cached = None if request.is_held else self._find_cached(request, draft)
            if cached is None:
                place, passed_over = place + 1, passed_over + (not request.is_held)
                continue
            if not self._fits(request, cached, draft):
                return
            self.waiting.pop(place)
            self._admit(request, cached, draft)

    def _find_cached(self, request: Request, draft: Draft) -> list[int] | None:
        """The blocks that a waiting request need not compute. None for one that is passed over: one that waits for a
        block that another request computes, and a new long prompt while one of better rank is not complete, since its
        blocks would lie idle."""
        if request.num_swapped_blocks:
            return [0] * self.kv.passed_blocks(request.num_computed_tokens)
        if request.awaited_block is not None and self.kv.is_announced(request.awaited_block):
            return None
        cached = self.kv.find_cached(request)
        request.awaited_block = self.kv.awaited(request, len(cached))
        is_long = request.num_tokens - len(cached) * self.kv.block_size > draft.budget
        is_early = is_long and not request.num_preemptions and any(r.rank < request.rank for r in draft.incomplete)
        return None if request.awaited_block is not None or is_early else cached

    def _fits(self, request: Request, cached: list[int], draft: Draft) -> bool:
        """Whether there is room for all of its tokens, though this step may compute a part, and for the blocks that
        those who run need next: else somebody would be preempted soon. A request that was preempted before waits for
        more room: each time, the others must grow twice as far until it can happen again."""
        if request.num_swapped_blocks and self.swap is not None and not self.swap.arrived(request.request_id):
            return False
        spare = self.kv.blocks_for(len(self.running)) << min(request.num_preemptions, 32)
        brought = request.num_swapped_blocks + len(cached)  # what the device's table is told of
        return brought <= draft.cached_blocks and self.kv.fits(self._tokens_to_hold(request, cached), cached, spare)

    def _tokens_to_hold(self, request: Request, cached: list[int]) -> int:
        """Tokens that need blocks when a request is admitted: all, or what a sliding window and a step can touch, which
        is no more than any pool has that longer requests are let in for."""
        if self.kv.window is None:
            return request.num_tokens
        passed, known = cached.count(0) * self.kv.block_size, len(cached) * self.kv.block_size
        reach = max(passed + self.kv.window, known) + self.limits.max_num_batched_tokens
        return min(request.num_tokens, max(reach, request.num_computed_tokens))

    def _admit(self, request: Request, cached: list[int], draft: Draft) -> None:
        tokens = self._tokens_to_hold(request, cached)
        if request.num_swapped_blocks:
            self._swap_in(request, tokens, draft)
        else:
            self.kv.take_cached(request, cached)
            grown = self.kv.grow(request, tokens)
            assert grown, "blocks vanished between the check and the allocation"
            request.num_computed_tokens = len(cached) * self.kv.block_size
            self.kv.announce(request)
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        self.running.append(request)
        wanted = wanted_tokens(request)
        if wanted > draft.budget:
            draft.incomplete.append(request)
            wanted = -(-draft.budget // 2)
        draft.put(request, draft.size(request, wanted))
        draft.admitted.append(request)
        draft.cached_blocks -= len(cached)
        if not request.num_preemptions and self.kv.prefix_caching and request.takes_cached_blocks:
            request.num_cached_tokens = request.num_computed_tokens
            draft.queried_tokens += request.num_tokens
            draft.cached_tokens += request.num_computed_tokens

    def _swap_in(self, request: Request, num_tokens: int, draft: Draft) -> None:
        assert self.swap is not None
        blocks = self.kv.take_swapped(request, num_tokens)
        assert len(blocks) == request.num_swapped_blocks
        draft.swap_in.append(Swap(request.request_id, blocks))
        draft.cached_blocks -= len(blocks)
        self.swap.give_back(len(blocks))
        request.num_swapped_blocks = 0

    def _commit(self, draft: Draft) -> SchedulerOutput:
        decode: list[ScheduledRequest] = []
        prefill: list[ScheduledRequest] = []
        greedy, logprobs, top_logprobs, options = True, False, False, False
        for request, count in draft.counts.items():
            rows = prefill if is_prefill(request, count) else decode
            row = self._schedule_request(request, count)
            rows.append(row)
            if row.samples:
                greedy &= request.sampling.greedy
                logprobs |= row.wants_logprobs
                top_logprobs |= bool(request.sampling.logprobs)
                options |= request.has_options
        preempted, self._preempted = tuple(self._preempted), []
        swap_out, self._swap_out = tuple(self._swap_out), []
        evicted, self._evicted = self.kv.pool.num_evicted - self._evicted, self.kv.pool.num_evicted
        return SchedulerOutput(
            decode=decode,
            prefill=prefill,
            greedy=greedy,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            options=options,
            swap_out=swap_out,
            swap_in=tuple(draft.swap_in),
            preempted=preempted,
            admitted=tuple(r.request_id for r in draft.admitted),
            queried_tokens=draft.queried_tokens,
            cached_tokens=draft.cached_tokens,
            num_evicted=evicted,
        )

    def _schedule_request(self, request: Request, count: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        end = start + count
        tokens = request.token_ids[start:end]
        if len(tokens) < count:
            assert count == 1, "only the token that comes next can be on the device alone"
            tokens = [DEVICE_TOKEN]
        samples = end == request.num_tokens and request.max_tokens > 0
        blocks = self.kv.blocks_for(end)
        item = ScheduledRequest(
            request_id=request.request_id,
            slot=request.slot,
            token_ids=tokens,
            seq_len=end,
            samples=samples,
            new_blocks=request.block_ids[request.num_device_blocks : blocks],
            wants_logprobs=request.sampling.logprobs is not None,
            sampling=None if request.num_device_blocks else row_sampling(request),
            prompt_work=take_prompt_work(request, start, end) if start < request.examined_until else None,
        )
        request.num_computed_tokens = end
        request.num_device_blocks = blocks
        request.steps_in_flight += 1
        request.num_in_flight += samples
        return item

    def collect(
        self, item: ScheduledRequest, token_ids: list[int], *, finite: bool = True
    ) -> tuple[Request, list[int]]:
        """A step's result for one request: the request, and the tokens that were appended. A request that reaches its
        end is finished; tokens after the end, or of a request that was finished meanwhile, are dropped. What was
        written is shared with nobody if the logits were not ``finite``."""
        request = self._requests[item.request_id]
        request.steps_in_flight -= 1
        request.num_in_flight -= item.samples
        if request.status is Status.FINISHED:
            self._retire(request)
            return request, []
        if not finite:
            self.kv.distrust(request)
        elif item.seq_len // self.kv.block_size > request.num_published_blocks:
            self.kv.publish(request, item.seq_len)
        if self.kv.window is not None:
            self.kv.free_passed(request, item.seq_len)
        kept = []
        for token in token_ids:
            kept.append(token)
            request.token_ids.append(token)
            if reason := _end(request, token):
                self.finish(request, reason)
                break
        return request, kept

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state; a second end changes nothing."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
            if request.num_swapped_blocks:
                assert self.swap is not None
                self.swap.give_back(request.num_swapped_blocks)
                request.num_swapped_blocks = 0
                self._swap_out = [swap for swap in self._swap_out if swap.request_id != request.request_id]
        else:
            self.running.remove(request)
        self.kv.withdraw_announcement(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self._retire(request)

    def _retire(self, request: Request) -> None:
        if not request.steps_in_flight:
            self._release(request)
            del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        """Give slot and blocks back."""
        self.kv.free(request)
        request.num_device_blocks = 0
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` if a block, slot or request was lost or doubled."""
        check_integrity(self, list(self._requests.values()), self._free_slots)


def _end(request: Request, token: int) -> FinishReason | None:
    if token in request.stop_ids:
        return FinishReason.STOP
    if len(request.token_ids) >= request.length_limit:
        return FinishReason.LENGTH
    return None
