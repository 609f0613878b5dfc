"""Any order of operations: nothing is lost, nobody reads another's blocks, everybody gets the tokens of a lone run."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.request import FinishReason, Request, SamplingParams, Status
from jaxserve.scheduling.draft import SchedulerLimits
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import SchedulerOutput
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.swap_space import SwapSpace
from tests.scheduling.factories import make_request
from tests.scheduling.shadow import ShadowDevice, lone_answer

BLOCK = 4


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.sampled_from([1, 2]),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_blocks=st.integers(12, 24),
        window=st.sampled_from([None, None, 6, 13]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        step_sizes=st.sampled_from([(), (4, 8, 16)]),
    )
    def begin(self, depth, policy, num_blocks, window, prefix_caching, step_sizes):
        kv = KVManager(num_blocks, BLOCK, prefix_caching=prefix_caching, window=window)
        self.swap = SwapSpace(num_blocks=16, blocks_per_program=4, seconds_per_program=1.0)
        self.scheduler = Scheduler(SchedulerLimits(5, 16, 3, step_sizes, (4, 12)), kv, policy, self.swap)
        self.device = ShadowDevice(self.scheduler)
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, list[list[int]]]] = deque()
        self.requests: list[Request] = []
        self.examined: dict[str, list[int]] = defaultdict(list)
        """Places in the prompt that were looked at, by request."""

    @rule(
        shared=st.integers(0, 5),
        own=st.integers(1, 8),
        kind=st.integers(0, 2),
        max_tokens=st.integers(1, 16),
        priority=st.integers(-2, 2),
        salt=st.sampled_from([None, None, "salt"]),
        arrival=st.floats(0, 30),
        asks=st.sampled_from([None, None, None, "scores", "scores alone", "last", "mean"]),
    )
    def add(self, shared, own, kind, max_tokens, priority, salt, arrival, asks):
        """Prompts that share blocks, and some that are equal; some are asked for what they tell themselves."""
        prompt = [100 + kind] * (BLOCK * shared) + [200 + kind] * own
        fields = {"priority": priority, "cache_salt": salt, "arrival_time": arrival}
        if asks in ("scores", "scores alone"):
            fields["sampling"] = SamplingParams(prompt_logprobs=0)
        elif asks:
            fields["pooling"] = asks
        request = make_request(prompt, max_tokens if asks in (None, "scores") else 0, **fields)
        self.requests.append(request)
        self.scheduler.add(request)

    @rule()
    def submit(self):
        while len(self.in_flight) < self.depth and (step := self.scheduler.schedule()):
            self.in_flight.append((step, self.device.execute(step)))
            assert not any(row.prompt_work for row in step.decode)
            for row in step.prefill:
                self.look(row)
        assert self.in_flight or not len(self.scheduler), "requests wait and nothing moves"

    def look(self, row):
        work = row.prompt_work
        if work is not None:
            first = row.seq_len - len(row.token_ids) + work.first
            self.examined[row.request_id] += range(first, first + work.count)
            if work.targets is not None:
                prompt = self.scheduler.get(row.request_id).token_ids
                assert work.targets == prompt[first + 1 : first + 1 + work.count]

    @rule()
    def collect(self):
        if self.in_flight:
            step, tokens = self.in_flight.popleft()
            for row, sampled in zip(step.rows, tokens, strict=True):
                request, _ = self.scheduler.collect(row, sampled)
                if not request.max_tokens and row.seq_len == request.prompt_len:
                    self.scheduler.finish(request, FinishReason.LENGTH)

    @rule()
    def step(self):
        self.submit()
        self.collect()

    @rule(
        choice=st.integers(0, 99), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR, FinishReason.STOP])
    )
    def end(self, choice, reason):
        """In any state, ended ones included."""
        if self.requests:
            self.scheduler.finish(self.requests[choice % len(self.requests)], reason)

    @rule(choice=st.integers(0, 99))
    def preempt(self, choice):
        idle = [request for request in self.scheduler.running if not request.steps_in_flight]
        if idle:
            self.scheduler._preempt(idle[choice % len(idle)])

    @rule(pays=st.booleans())
    def change_the_price(self, pays):
        self.swap.seconds_per_token = 100.0 if pays else 0.0

    @rule()
    def evict(self):
        self.scheduler.kv.reset_cache()

    @invariant()
    def nothing_is_lost(self):
        self.scheduler.check_integrity()

    @invariant()
    def answers_are_those_of_lone_runs(self):
        for request in self.requests:
            if request.output_token_ids:
                expected = lone_answer(request.token_ids[: request.prompt_len], request.num_output_tokens)
                assert request.output_token_ids == expected

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while len(self.scheduler):
            self.step()
            self.scheduler.check_integrity()
            steps += 1
            assert steps < 5000, "no end"
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_usable and self.swap.num_free == self.swap.num_blocks
        for request in self.requests:
            assert request.status is Status.FINISHED
            if request.finish_reason is FinishReason.LENGTH:
                assert request.num_output_tokens == request.max_tokens
                assert self.examined[request.request_id] == asked_for(request)


def asked_for(request: Request) -> list[int]:
    """Each place once and in order, whatever was preempted."""
    if request.pooling == "last":
        return [request.prompt_len - 1]
    if request.pooling == "mean":
        return list(range(request.prompt_len))
    return list(range(request.prompt_len - 1)) if request.sampling.prompt_logprobs is not None else []


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,  # 200 times 50 operations
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
