"""Runs the real scheduler against a runner that only says how long a step would take: thousands of requests in seconds.

    python bench/simulate.py                              # 2,000 requests of log-normal lengths, 25 a second
    python bench/simulate.py --trace requests.jsonl       # replay a trace
    python bench/simulate.py --waste                      # slots that lie idle, by block size

A trace has a JSON object a line: ``arrival`` (seconds), ``prompt_len``, ``output_len``, and optionally ``prefix_id``,
``prefix_len`` and ``priority``. Prompts of one prefix_id begin with the same prefix_len tokens (default: half of the
prompt). The default costs are those of Llama-3.1-8B's shape on an H200.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxserve.request import EngineRequest, Request, SamplingParams
from jaxserve.scheduling.draft import SchedulerLimits
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import SchedulerOutput
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.swap_space import SwapSpace

TOKEN = 9
SWAP_PROGRAM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Arrival:
    """One line of a trace."""

    arrival: float
    prompt_len: int
    output_len: int
    prefix_id: int | None = None
    prefix_len: int | None = None
    priority: int = 0

    def prompt(self, index: int) -> list[int]:
        """Token ids: those of the shared prefix, then those that no other request has."""
        shared = 0
        if self.prefix_id is not None:
            shared = self.prompt_len // 2 if self.prefix_len is None else min(self.prefix_len, self.prompt_len)
        own = random.Random(index)
        prefix = random.Random(f"prefix {self.prefix_id}")
        return [prefix.randrange(2**20) for _ in range(shared)] + [
            own.randrange(2**20) for _ in range(self.prompt_len - shared)
        ]


STEP_SIZES = (128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)
"""What steps with prompts are padded to."""


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    step: float = 0.5e-3
    weights: float = 3.6e-3
    """Reading them, while tokens are multiplied with them."""
    token: float = 21.4e-6
    """Multiplying the weights with a token, padding too."""
    context_token: float = 32e-9
    """A token of KV that is read."""
    swapped_program: float = 2.5e-3
    """64 blocks, one way."""


class FakeRunner:
    """Says how long each step takes; steps run one after the other, whatever is in flight."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def seconds(self, step: SchedulerOutput) -> float:
        costs = self.costs
        context = sum(row.seq_len for row in step.rows)
        programs = sum(-(-len(swap.block_ids) // SWAP_PROGRAM_BLOCKS) for swap in (*step.swap_out, *step.swap_in))
        tokens = step.num_tokens
        if step.prefill:
            tokens = next(size for size in STEP_SIZES if size >= tokens)
        return (
            costs.step
            + math.hypot(costs.weights, costs.token * tokens)
            + costs.context_token * context
            + costs.swapped_program * programs
        )


@dataclass
class Result:
    """What a simulation counted. Times are simulated seconds, but for ``host_seconds``."""

    seconds: float = 0.0
    steps: int = 0
    host_seconds: float = 0.0
    output_tokens: int = 0
    preempted: int = 0
    swapped: int = 0
    evicted: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    most_preemptions: int = 0
    waiting: list[float] = field(default_factory=list)
    """Of each request, from arrival to admission; likewise to the first token, and each gap between tokens."""
    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    used_slots: float = 0.0
    """Slot-seconds that hold a token; likewise those of blocks that are held, and of contiguous allocation."""
    block_slots: float = 0.0
    exact_slots: float = 0.0
    whole_slots: float = 0.0


class Simulation:
    """A scheduler with a clock of its own."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, *, depth: int, max_model_len: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.result = Result()
        self._depth = depth
        self._max_model_len = max_model_len
        self._in_flight: deque[tuple[SchedulerOutput, float]] = deque()
        self._busy_until = 0.0
        self._requests: dict[str, Request] = {}
        self._last_token: dict[str, float] = {}

    def run(self, trace: Iterable[Arrival]) -> Result:
        arriving = deque(enumerate(sorted(trace, key=lambda item: item.arrival)))
        now = 0.0
        while arriving or len(self.scheduler):
            if not len(self.scheduler):
                now = max(now, arriving[0][1].arrival)
            while arriving and arriving[0][1].arrival <= now:
                self._add(*arriving.popleft())
            start = time.perf_counter()
            while len(self._in_flight) < self._depth and (step := self.scheduler.schedule()):
                self._submit(step, now)
            self.result.host_seconds += time.perf_counter() - start
            if not self._in_flight:
                assert arriving, "requests wait and nothing runs"
                now = arriving[0][1].arrival
                continue
            step, end = self._in_flight.popleft()
            self._measure_slots(end - now)
            now = max(now, end)
            start = time.perf_counter()
            self._collect(step, now)
            self.result.host_seconds += time.perf_counter() - start
        self.result.seconds = now
        return self.result

    def _add(self, index: int, item: Arrival) -> None:
        engine_request = EngineRequest(
            request_id=f"cmpl-{index:032x}-0-0",
            prompt_token_ids=item.prompt(index),
            sampling=GREEDY,
            max_tokens=item.output_len,
            seed=index,
            arrival_time=item.arrival,
            priority=item.priority,
        )
        request = Request.create(engine_request, client=b"", eos_ids=frozenset(), order=index)
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def _submit(self, step: SchedulerOutput, now: float) -> None:
        self._busy_until = max(now, self._busy_until) + self.runner.seconds(step)
        self._in_flight.append((step, self._busy_until))
        result = self.result
        result.steps += 1
        result.preempted += len(step.preempted)
        result.swapped += len(step.swap_out)
        result.evicted += step.num_evicted
        result.queried_tokens += step.queried_tokens
        result.cached_tokens += step.cached_tokens
        for request_id in step.admitted:
            request = self._requests[request_id]
            if not request.scheduled_time:
                request.scheduled_time = now
                result.waiting.append(now - request.arrival_time)

    def _collect(self, step: SchedulerOutput, now: float) -> None:
        result = self.result
        for row in step.rows:
            request, tokens = self.scheduler.collect(row, [TOKEN] if row.samples else [])
            if not tokens:
                continue
            result.output_tokens += 1
            if last := self._last_token.get(row.request_id):
                result.gaps.append(now - last)
            else:
                result.first_token.append(now - request.arrival_time)
            self._last_token[row.request_id] = now
            if request.finish_reason:
                result.most_preemptions = max(result.most_preemptions, request.num_preemptions)
                del self._last_token[row.request_id], self._requests[row.request_id]

    def _measure_slots(self, seconds: float) -> None:
        result, running = self.result, self.scheduler.running
        result.used_slots += seconds * sum(r.num_computed_tokens for r in running)
        result.block_slots += seconds * self.scheduler.kv.block_size * sum(len(r.block_ids) for r in running)
        result.exact_slots += seconds * sum(r.prompt_len + r.max_tokens for r in running)
        result.whole_slots += seconds * self._max_model_len * len(running)


def log_normal_trace(count: int, rate: float, seed: int, shared: float) -> Iterator[Arrival]:
    """Requests of log-normal lengths (prompts of 16 to 1,024 tokens, answers of 8 to 512), ``rate`` of them a second;
    a share of ``shared`` begins with one of eight prefixes."""
    rng = random.Random(seed)
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = min(max(int(rng.lognormvariate(5.2, 0.9)), 16), 1024)
        answer = min(max(int(rng.lognormvariate(5.1, 0.8)), 8), 512)
        yield Arrival(now, prompt, answer, prefix_id=rng.randrange(8) if rng.random() < shared else None)


def read_trace(path: Path) -> list[Arrival]:
    """Raises ``ValueError`` naming the line."""
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            items.append(Arrival(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return items


def simulate(trace: Iterable[Arrival], options: argparse.Namespace) -> Result:
    kv = KVManager(options.blocks, options.block_size, prefix_caching=options.prefix_caching, window=options.window)
    costs = Costs()
    swap = None
    if options.swap_blocks:
        swap = SwapSpace(options.swap_blocks, SWAP_PROGRAM_BLOCKS, 2 * costs.swapped_program)
        swap.seconds_per_token = costs.token
    limits = SchedulerLimits(
        options.max_num_seqs, options.max_num_batched_tokens, 64, STEP_SIZES, tuple(options.prefill_chunk_tokens)
    )
    scheduler = Scheduler(limits, kv, options.policy, swap)
    simulation = Simulation(scheduler, FakeRunner(costs), depth=options.depth, max_model_len=options.max_model_len)
    result = simulation.run(trace)
    scheduler.check_integrity()
    return result


def show(result: Result) -> None:
    rate = result.output_tokens / result.seconds
    print(f"{len(result.first_token)} requests in {result.seconds:.1f} s: {rate:,.0f} output tokens/s")
    print(f"{result.steps} steps, {1e6 * result.host_seconds / result.steps:.0f} us of host time each")
    for name, values in (
        ("waiting", result.waiting),
        ("time to first token", result.first_token),
        ("between tokens", result.gaps),
    ):
        marks = ", ".join(f"p{p} {1000 * percentile(values, p):.1f}" for p in (50, 90, 99))
        print(f"{name}, ms: {marks}")
    found = result.cached_tokens / max(result.queried_tokens, 1)
    print(f"prefix cache: {100 * found:.1f} % of {result.queried_tokens:,} tokens found, {result.evicted:,} evictions")
    print(
        f"preemptions: {result.preempted}, of which swapped {result.swapped};"
        f" most of one request {result.most_preemptions}"
    )


def show_waste(trace: list[Arrival], options: argparse.Namespace) -> None:
    """Share of the slots held that hold no token, over time."""
    print("allocation                        | unused slots")
    options.prefix_caching = False
    for block_size in (16, 32, 64):
        blocks = options.blocks * options.block_size // block_size
        result = simulate(trace, argparse.Namespace(**{**vars(options), "block_size": block_size, "blocks": blocks}))
        print(f"blocks of {block_size:<23} | {100 * (1 - result.used_slots / result.block_slots):.1f} %")
    print(f"contiguous, prompt and max_tokens | {100 * (1 - result.used_slots / result.exact_slots):.1f} %")
    print(f"contiguous, {options.max_model_len:<21,} | {100 * (1 - result.used_slots / result.whole_slots):.1f} %")


def percentile(values: list[float], percent: float) -> float:
    """Of values in any order; 0 of none."""
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)] if values else 0.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="JSON lines; else requests are made up")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second")
    parser.add_argument("--shared", type=float, default=0.5, help="share of requests that begin with a shared prefix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=8192, help="KV blocks, block 0 included")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--swap-blocks", type=int, default=0, help="blocks that host memory holds")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument(
        "--prefill-chunk-tokens", type=int, nargs=2, default=(384, 1792), help="prompt tokens while sequences decode"
    )
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--window", type=int, help="sliding window of all layers")
    parser.add_argument("--depth", type=int, default=2, help="steps in flight")
    parser.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--waste", action="store_true", help="unused slots by block size, and of contiguous allocation")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.trace:
        trace = read_trace(options.trace)
    else:
        trace = list(log_normal_trace(options.requests, options.rate, options.seed, options.shared))
    if options.waste:
        show_waste([replace(item, prefix_id=None) for item in trace], options)
    else:
        show(simulate(trace, options))


if __name__ == "__main__":
    main()
