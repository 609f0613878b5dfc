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

from collections.abc import Iterable
from typing import Literal

from jaxserve.request import FinishReason, Request, Status
from jaxserve.scheduling.draft import Draft, SchedulerLimits, is_prefill
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import DEVICE_TOKEN, RowSampling, ScheduledRequest, SchedulerOutput
from jaxserve.scheduling.waiting import WaitingQueue, by_rank

SchedulingPolicy = Literal["fcfs", "priority"]

AGING_SECONDS = 10.0
"""Under the priority policy, a level of priority is worth this much waiting time."""

LOOKAHEAD = 256
"""Waiting requests that may be passed over to admit a later one, which bounds the time that looking for it takes."""


class _DrainNeeded(Exception):
    """Blocks must be taken from a request that a step in flight still uses: collect that step first."""


class Scheduler:
    """Owns every request from its arrival until it is finished and its last step was collected."""

    def __init__(self, limits: SchedulerLimits, kv: KVManager, policy: SchedulingPolicy = "fcfs") -> None:
        self.limits = limits
        self.kv = kv
        self.policy = policy
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self._preempted: list[str] = []
        """Since the last step that was scheduled."""
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
        draft = Draft(self.limits)
        try:
            prompts = self._schedule_decoding(draft)
            self._schedule_prompts(draft, prompts)
        except _DrainNeeded:
            return None
        if not self._preempted:
            self._admit_waiting(draft)
        self._spend_rest(draft)
        return self._commit(draft) if draft.counts else None

    def _schedule_decoding(self, draft: Draft) -> list[Request]:
        """Requests that want one token come first, so that a long prompt never stalls them; returns the others."""
        prompts = []
        block_size = self.kv.block_size
        for request in tuple(self.running):
            wanted = _wanted(request)
            if wanted > 1:
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
            wanted = _wanted(request)
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
            count = draft.size(request, _wanted(request))
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
        self._release(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.add(request)
        self._preempted.append(request.request_id)

    def _admit_waiting(self, draft: Draft) -> None:
        """Admit by rank until somebody does not fit. Those are passed over who wait for a block that another request
        computes, and new long prompts while one of better rank is not complete: their blocks would lie idle."""
        place = 0
        while place < min(len(self.waiting), LOOKAHEAD):
            if not (self._free_slots and draft.budget and draft.prefill_rows):
                return
            request = self.waiting[place]
            if request.awaited_block is not None and self.kv.is_announced(request.awaited_block):
                place += 1
                continue
            cached = self.kv.find_cached(request)
            request.awaited_block = self.kv.awaited(request, len(cached))
            wanted = request.num_tokens - len(cached) * self.kv.block_size
            is_new_and_long = wanted > draft.budget and not request.num_preemptions
            is_early = is_new_and_long and any(r.rank < request.rank for r in draft.incomplete)
            if request.awaited_block is not None or is_early:
                place += 1
                continue
            if not self._fits(request, cached, draft):
                return
            self.waiting.pop(place)
            self._admit(request, cached, draft)

    def _fits(self, request: Request, cached: list[int], draft: Draft) -> bool:
        """Whether there is room for all of its tokens, though this step may compute a part, and for the blocks that
        those who run need next: else somebody would be preempted soon. A request that was preempted before waits for
        more room: each time, the others must grow twice as far until it can happen again."""
        spare = self.kv.blocks_for(len(self.running)) << min(request.num_preemptions, 32)
        tokens = self._tokens_to_hold(request, len(cached))
        return len(cached) <= draft.cached_blocks and self.kv.fits(tokens, cached, spare)

    def _tokens_to_hold(self, request: Request, num_cached: int) -> int:
        """Tokens that need blocks when a request is admitted: all, or what a sliding window and a step can touch."""
        if self.kv.window is None:
            return request.num_tokens
        ahead = self.kv.window + self.limits.max_num_batched_tokens
        return min(request.num_tokens, num_cached * self.kv.block_size + ahead)

    def _admit(self, request: Request, cached: list[int], draft: Draft) -> None:
        self.kv.take_cached(request, cached)
        grown = self.kv.grow(request, self._tokens_to_hold(request, len(cached)))
        assert grown, "blocks vanished between the check and the allocation"
        request.num_computed_tokens = len(cached) * self.kv.block_size
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        self.running.append(request)
        self.kv.announce(request)
        wanted = _wanted(request)
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

    def _commit(self, draft: Draft) -> SchedulerOutput:
        decode: list[ScheduledRequest] = []
        prefill: list[ScheduledRequest] = []
        greedy, logprobs = True, False
        for request, count in draft.counts.items():
            rows = prefill if is_prefill(request, count) else decode
            row = self._schedule_request(request, count)
            rows.append(row)
            if row.samples:
                greedy &= request.sampling.greedy
                logprobs |= row.wants_logprobs
        preempted, self._preempted = tuple(self._preempted), []
        evicted, self._evicted = self.kv.pool.num_evicted - self._evicted, self.kv.pool.num_evicted
        return SchedulerOutput(
            decode=decode,
            prefill=prefill,
            greedy=greedy,
            logprobs=logprobs,
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
        samples = end == request.num_tokens
        blocks = self.kv.blocks_for(end)
        item = ScheduledRequest(
            request_id=request.request_id,
            slot=request.slot,
            token_ids=tokens,
            seq_len=end,
            samples=samples,
            new_blocks=request.block_ids[request.num_device_blocks : blocks],
            wants_logprobs=request.sampling.logprobs is not None,
            sampling=None
            if request.num_device_blocks
            else RowSampling(request.sampling, request.seed, request.choice_index),
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
        if finite and item.seq_len // self.kv.block_size > request.num_published_blocks:
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
        else:
            self.running.remove(request)
        if reason is FinishReason.ERROR:
            self.kv.distrust(request)
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
        requests = list(self._requests.values())
        self.kv.check_integrity(requests)
        slots = [r.slot for r in requests if r.slot >= 0] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), f"slots lost or doubled: {sorted(slots)}"
        self.waiting.check_integrity()
        _check_listed(self.waiting, requests, Status.WAITING)
        _check_listed(self.running, requests, Status.RUNNING)
        for request in requests:
            held = self.kv.blocks_for(request.num_computed_tokens)
            assert len(request.block_ids) >= held, f"{request.request_id} lacks blocks for its computed tokens"
            assert request.num_computed_tokens <= request.num_tokens
            assert 0 <= request.num_in_flight <= request.steps_in_flight
            if request.status is Status.WAITING:
                assert not request.block_ids and not request.steps_in_flight and request.slot < 0
            if request.status is Status.FINISHED:
                assert request.steps_in_flight, f"{request.request_id} is finished but was not forgotten"


def _wanted(request: Request) -> int:
    """Tokens the request could compute now; none if the last token it may have is already in flight."""
    if request.num_output_tokens + request.num_in_flight >= request.max_tokens:
        return 0
    return request.num_tokens - request.num_computed_tokens


def _end(request: Request, token: int) -> FinishReason | None:
    if token in request.stop_ids:
        return FinishReason.STOP
    if request.num_output_tokens >= request.max_tokens:
        return FinishReason.LENGTH
    return None


def _check_listed(listed: Iterable[Request], requests: list[Request], status: Status) -> None:
    ids = [r.request_id for r in listed]
    assert len(set(ids)) == len(ids), f"a {status.value} request is listed twice"
    assert set(ids) == {r.request_id for r in requests if r.status is status}, f"{status.value} list is wrong"
