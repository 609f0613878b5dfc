"""Which request computes how many tokens in the next step.

There is no prefill or decode phase: a request wants ``num_tokens - num_computed_tokens`` tokens and the token budget
gives it some. Requests join and leave at any step. When blocks run out, the latest arrival is preempted: its blocks are
freed, and later all its tokens are computed again.

Steps may be in flight: submitted and not collected yet. Their sampled tokens count as known (the device has them), and
what they touch is freed only once they are collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.request import FinishReason, Request, Status
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import DEVICE_TOKEN, RowOptions, RowSampling, ScheduledRequest, SchedulerOutput


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_rows: int
    """Requests that compute more than one token in the same step."""


class _DrainNeeded(Exception):
    """Blocks must be taken from a request that a step in flight still uses: collect that step first."""


class _Draft:
    """A step in the making: how many tokens each request computes."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.counts: dict[Request, int] = {}
        self.budget = limits.max_num_batched_tokens
        self.prefill_rows = limits.max_prefill_rows
        self.admitted: list[Request] = []

    def size(self, request: Request, wanted: int) -> int:
        """Tokens that a request that wants ``wanted`` can have; 0 if none."""
        count = min(wanted, self.budget)
        return 0 if not self.prefill_rows and _is_prefill(request, count) else count

    def put(self, request: Request, count: int) -> None:
        self.counts[request] = count
        self.budget -= count
        self.prefill_rows -= _is_prefill(request, count)

    def drop(self, request: Request) -> None:
        if count := self.counts.pop(request, 0):
            self.budget += count
            self.prefill_rows += _is_prefill(request, count)


class Scheduler:
    """Owns every request from its arrival until it is finished and its last step was collected."""

    def __init__(self, limits: SchedulerLimits, kv: KVManager) -> None:
        self.limits = limits
        self.kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self._preempted: list[str] = []
        """Since the last step that was scheduled."""

    def __len__(self) -> int:
        """Requests that are not finished, or whose last step is still in flight."""
        return len(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``ValueError`` for an id that is in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can run before a step in flight is collected (or at all)."""
        draft = _Draft(self.limits)
        try:
            self._schedule_running(draft)
            if not self._preempted:
                self._admit_waiting(draft)
        except _DrainNeeded:
            return None
        return self._commit(draft) if draft.counts else None

    def _schedule_running(self, draft: _Draft) -> None:
        # Decoding requests first, so that a long prompt never stalls them.
        wanted = [(r, _wanted(r)) for r in self.running]
        for request, count in [*(w for w in wanted if w[1] == 1), *(w for w in wanted if w[1] > 1)]:
            count = draft.size(request, count)
            if count and request.status is Status.RUNNING and self._make_room(request, count, draft):
                draft.put(request, count)

    def _make_room(self, request: Request, count: int, draft: _Draft) -> bool:
        """Get blocks for the request, preempting if need be; False if the request itself had to go."""
        while not self.kv.grow(request, request.num_computed_tokens + count):
            if any(r.steps_in_flight for r in self._requests.values() if r.status is Status.FINISHED):
                raise _DrainNeeded  # blocks are about to become free
            victim = max(self.running, key=lambda r: r.arrival_order)
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
        self.waiting.appendleft(request)
        self._preempted.append(request.request_id)

    def _admit_waiting(self, draft: _Draft) -> None:
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            count = draft.size(request, _wanted(request))
            # Room for all of its tokens, though this step may compute a part, and for the blocks that those who run
            # need next: else somebody would be preempted soon.
            spare = self.kv.blocks_for(len(self.running))
            if not count or not self.kv.fits(request.num_tokens, spare):
                return
            grown = self.kv.grow(request, count)
            assert grown, "blocks vanished between the check and the allocation"
            self.waiting.popleft()
            request.status = Status.RUNNING
            request.slot = self._free_slots.pop()
            self.running.append(request)
            draft.put(request, count)
            draft.admitted.append(request)

    def _commit(self, draft: _Draft) -> SchedulerOutput:
        decode: list[ScheduledRequest] = []
        prefill: list[ScheduledRequest] = []
        greedy, logprobs, top_logprobs, options = True, False, False, False
        for request, count in draft.counts.items():
            rows = prefill if _is_prefill(request, count) else decode
            row = self._schedule_request(request, count)
            rows.append(row)
            if row.samples:
                greedy &= request.sampling.greedy
                logprobs |= row.wants_logprobs
                top_logprobs |= bool(request.sampling.logprobs)
                options |= request.has_options
        preempted, self._preempted = tuple(self._preempted), []
        admitted = tuple(r.request_id for r in draft.admitted)
        return SchedulerOutput(
            decode=decode,
            prefill=prefill,
            greedy=greedy,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            options=options,
            preempted=preempted,
            admitted=admitted,
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
            sampling=None if request.num_device_blocks else _row_sampling(request),
        )
        request.num_computed_tokens = end
        request.num_device_blocks = blocks
        request.steps_in_flight += 1
        request.num_in_flight += samples
        return item

    def collect(self, item: ScheduledRequest, token_ids: list[int]) -> tuple[Request, list[int]]:
        """A step's result for one request: the request, and the tokens that were appended. A request that reaches its
        end is finished; tokens after the end, or of a request that was finished meanwhile, are dropped."""
        request = self._requests[item.request_id]
        request.steps_in_flight -= 1
        request.num_in_flight -= item.samples
        if request.status is Status.FINISHED:
            self._retire(request)
            return request, []
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


def _row_sampling(request: Request) -> RowSampling:
    options = None
    if request.has_options:
        options = RowOptions(list(request.token_ids), request.prompt_len, request.stop_ids)
    return RowSampling(request.sampling, request.seed, request.choice_index, options)


def _is_prefill(request: Request, count: int) -> bool:
    """Whether a request needs a prefill row: for several tokens, or to take its slot."""
    return count > 1 or request.num_device_blocks == 0


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
