"""Prefix cache, preemption, swap and eviction are invisible: tokens are those of lone runs on a cold cache."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from jaxserve.engine.admission import make_requests
from jaxserve.engine.core import EngineCore
from jaxserve.engine.llm import LLM
from jaxserve.request import Request, SamplingParams, Status
from tests.conftest import ONE_CHUNK, SCARCE
from tests.exposition import samples

Work = tuple[list[int], SamplingParams]
MODELS = ("tiny-llama-3.1", "tiny-mistral-swa")
SWAP_SPACE = 3 / 256
"""GiB, for a few programs of blocks."""


def shared_work(count: int, seed: int) -> list[Work]:
    """Prompts that begin with one of three prefixes, or go on where another one ended, greedy and seeded."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 500) for _ in range(length)] for length in (16, 40, 64)]
    work = []
    for index in range(count):
        tail = [rng.randrange(3, 500) for _ in range(rng.choice((1, 2, 7, 8, 16, 24)))]
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 1.0, "top_p": 0.9, "seed": index}
        params = SamplingParams(**sampling, max_tokens=rng.randint(20, 60), ignore_eos=True)
        work.append((rng.choice(prefixes) + tail, params))
    return work


def run(engine: EngineCore, work: list[Work], per_step: int) -> list[list[int]]:
    """The answers, for requests that arrive ``per_step`` before each step."""
    answers: dict[str, list[int]] = {}
    arriving = list(enumerate(work))
    while arriving or engine.has_work():
        for index, (prompt, sampling) in arriving[:per_step]:
            [request] = make_requests(f"w{index}", prompt, sampling, engine.info)
            engine.add_request(request)
            answers[request.request_id] = []
        arriving = arriving[per_step:]
        for _, output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
    return list(answers.values())


@pytest.fixture(scope="module", params=MODELS)
def lone(request: pytest.FixtureRequest, llm: Callable[..., LLM]) -> tuple[str, list[Work], list[list[int]]]:
    engine = llm(request.param, **ONE_CHUNK, enable_prefix_caching=False).engine
    work = shared_work(40, seed=3)
    return request.param, work, [run(engine, [item], 1)[0] for item in work]


@pytest.mark.parametrize("depth", [1, 2])
def test_everything_at_once_gives_the_tokens_of_lone_cold_runs(lone, llm, depth, monkeypatch):
    """40 requests with shared prefixes in a pool so small that each thing happens at least ten times."""
    name, work, expected = lone
    engine = llm(name, **SCARCE, async_depth=depth, swap_space=SWAP_SPACE).engine
    engine.reset_prefix_cache()
    monkeypatch.setattr(engine, "events", deque())  # of all steps, however many there are
    evicted = engine.scheduler.kv.pool.num_evicted
    press(engine, monkeypatch, random.Random(30 + depth))
    assert run(engine, work, 2) == expected
    preempted = sum(len(event.preempted) for event in engine.events)
    swapped = sum(len(event.swapped_out) for event in engine.events)
    hits = sum(event.cached_tokens > 0 for event in engine.events)
    assert swapped == sum(len(event.swapped_in) for event in engine.events)
    counts = preempted - swapped, swapped, hits, engine.scheduler.kv.pool.num_evicted - evicted
    print("computed again, swapped, hits, evicted", counts)
    assert min(counts) >= 10, counts
    told = samples(engine.metrics.exposition().decode())
    assert told["jaxserve:evicted_blocks_total"] == engine.scheduler.kv.pool.num_evicted


def press(engine: EngineCore, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Preempts somebody every few steps, since a sliding window would hardly ever need it, and swaps by chance."""
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule
    swap = scheduler.swap
    assert swap is not None
    victims: list[Request] = []

    def preempt_and_schedule():
        if not victims and scheduler.running and rng.random() < 0.1:
            victims.append(rng.choice(scheduler.running))
        if victims and victims[0].status is not Status.RUNNING:
            victims.clear()
        if victims and victims[0].steps_in_flight:
            return None  # drained first
        if victims:
            scheduler._preempt(victims.pop())
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", preempt_and_schedule)
    monkeypatch.setattr(swap, "pays", lambda blocks, tokens: swap.room(blocks) <= swap.num_free and rng.random() < 0.5)


def test_sc04_preempted_answers_are_whole_and_equal_to_their_solo_runs(llm):
    """8 greedy answers of 140 tokens where one fits, with the cache on."""
    work = [
        ([3 + index, 7, 9, 11], SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True)) for index in range(8)
    ]
    solo = llm("tiny-llama-3.1", enable_prefix_caching=False).engine
    expected = [run(solo, [item], 1)[0] for item in work]
    engine = llm("tiny-llama-3.1", **SCARCE).engine
    engine.events.clear()
    assert run(engine, work, 8) == expected and all(len(answer) == 140 for answer in expected)
    assert sum(len(event.preempted) for event in engine.events) >= 2


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_sc05_a_cache_hit_changes_no_token(llm, length):
    engine = llm("tiny-llama-3.1").engine
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = [(7 * i + length) % 500 + 3 for i in range(length)]
    half = [*prompt[:24], 5, 6, 7]
    cold = [run(engine, [(tokens, params)], 1) for tokens in (prompt, half)]
    assert [run(engine, [(tokens, params)], 1) for tokens in (prompt, half)] == cold
    engine.reset_prefix_cache()
    assert [run(engine, [(tokens, params)], 1) for tokens in (half, prompt)] == cold[::-1]
