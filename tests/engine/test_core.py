"""The engine as a plain object: life of a request, faults, metrics, accounting."""

from __future__ import annotations

import json
import random
import time

import jax
import numpy as np
import pytest

from jaxserve.engine.admission import make_requests
from jaxserve.engine.core import EngineCore
from jaxserve.engine.events import to_json
from jaxserve.request import EngineRequest, RequestError, SamplingParams
from tests.conftest import SCARCE
from tests.exposition import samples

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def add(engine: EngineCore, name: str, prompt_len: int = 5, sampling: SamplingParams = GREEDY) -> list[str]:
    requests = make_requests(name, list(range(10, 10 + prompt_len)), sampling, engine.info)
    for request in requests:
        engine.add_request(request)
    return [r.request_id for r in requests]


def drain(engine: EngineCore) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while engine.has_work():
        for _, output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.check_integrity()
    return outputs


def metrics(engine: EngineCore) -> dict[str, float]:
    return samples(engine.metrics.exposition().decode())


def test_tokens_come_one_a_step_and_the_last_says_why(llm):
    engine = llm("tiny-llama-3.1").engine
    [request_id] = add(engine, "life")
    outputs = drain(engine)[request_id]
    assert [len(o.token_ids) for o in outputs] == [1] * 6
    assert [o.finish_reason for o in outputs] == [None] * 5 + ["length"]
    timings = outputs[-1].timings
    assert timings.arrival <= timings.scheduled <= timings.first_token <= timings.last_token


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_is_idempotent_in_any_state(llm, depth):
    engine = llm("tiny-llama-3.1", async_depth=depth).engine
    ids = [add(engine, f"abort{i}-{depth}")[0] for i in range(6)]  # two of them wait for a slot
    engine.abort(["unknown", ids[5]])
    engine.step()
    engine.abort([ids[0], ids[0], ids[4]])
    engine.step()
    engine.abort([ids[0], ids[1]])
    outputs = drain(engine)
    assert set(outputs) <= set(ids[:4]) and all(outputs[i][-1].finish_reason == "length" for i in ids[2:4])
    assert not any(o.finish_reason for i in ids[:2] for o in outputs.get(i, [])), "an aborted request says no more"
    engine.abort(ids)
    engine.check_integrity()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [520]}, r"520 is not in \[0, 520\)"),
        ({"prompt_token_ids": [-1]}, "-1 is not in"),
        ({"prompt_token_ids": [1] * 513}, "513 tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": SamplingParams(stop_token_ids=(520,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(logprobs=21)}, "at most 20"),
    ],
)
def test_what_can_never_work_is_refused_at_the_door_and_costs_nobody_anything(llm, change, match):
    engine = llm("tiny-llama-3.1").engine
    [good] = add(engine, "good")
    fields = {"request_id": "bad", "prompt_token_ids": [1], "sampling": GREEDY, "max_tokens": 6, "seed": 0}
    with pytest.raises(RequestError, match=match):
        engine.add_request(EngineRequest(**{**fields, **change}))
    assert set(drain(engine)) == {good}


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers(llm):
    engine = llm("tiny-llama-3.1", **SCARCE).engine
    with pytest.raises(
        RequestError, match=r"KV cache capacity is 176 tokens.*needs 180: 170 of prompt and max_tokens=10"
    ):
        add(engine, "big", 170, SamplingParams(max_tokens=10))
    add(engine, "fits", 170, SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(drain(engine)["fits-0"]) == 4


def test_max_model_len_auto_is_what_the_pool_can_hold(llm):
    assert llm("tiny-llama-3.1", **SCARCE, max_model_len="auto").engine.info.max_model_len == 176


def test_non_finite_logits_end_their_request_alone(llm):
    """One request reads a poisoned cache block; its neighbour goes on to the tokens of its lone run."""
    engine = llm("tiny-llama-3.1").engine
    [expected] = drain_tokens(engine, "alone", prompt_len=9)
    errors = metrics(engine)["vllm:request_success_total{finished_reason=error}"]
    [bad] = add(engine, "bad", 40)
    [good] = add(engine, "good", 9)
    first = {output.request_id: output for _, output in engine.step()}
    poison_cache(engine, engine.scheduler.get(bad).block_ids)
    outputs = drain(engine)
    assert outputs[bad][-1].finish_reason == "error" and "non-finite" in outputs[bad][-1].error
    assert [t for o in (first[good], *outputs[good]) for t in o.token_ids] == expected
    assert metrics(engine)["vllm:request_success_total{finished_reason=error}"] == errors + 1


def test_a_broken_requests_blocks_harm_nobody_who_gets_them_later(llm):
    engine = llm("tiny-llama-3.1").engine
    [expected] = drain_tokens(engine, "before", prompt_len=9)
    poison_cache(engine, range(1, engine.runner.num_blocks))
    assert drain_tokens(engine, "after", prompt_len=9) == [expected]


def poison_cache(engine: EngineCore, blocks) -> None:
    """NaN in these blocks; through the host, since an eager operation on the device would count as a compilation."""
    runner = engine.runner
    poisoned = []
    for layer in runner._cache:
        arrays = [np.array(a) for a in layer]
        for array in arrays:
            array[list(blocks)] = np.nan
        poisoned.append(tuple(jax.device_put(a, old.sharding) for a, old in zip(arrays, layer, strict=True)))
    runner._cache = tuple(poisoned)


def drain_tokens(engine: EngineCore, name: str, **options) -> list[list[int]]:
    ids = add(engine, name, **options)
    outputs = drain(engine)
    return [[t for o in outputs[i] for t in o.token_ids] for i in ids]


def test_metrics_add_up(llm):
    """N requests of m tokens: the invariants of the HTTP contract."""
    engine = llm("tiny-llama-3.1").engine
    before = metrics(engine)
    count, m, prompt = 6, 5, 7
    for i in range(count):
        add(engine, f"m{i}", prompt, SamplingParams(temperature=0.0, max_tokens=m, ignore_eos=True))
    drain(engine)
    after = metrics(engine)
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gained["vllm:inter_token_latency_seconds_count"] == count * (m - 1)
    assert gained["vllm:iteration_tokens_total_sum"] == count * (prompt + m)
    assert gained["vllm:prompt_tokens_total"] == count * prompt
    assert gained["vllm:generation_tokens_total"] == count * m
    assert gained["vllm:request_success_total{finished_reason=length}"] == count
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert gained[f"vllm:{name}_seconds_count"] == count
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert after[gauge] == 0
    assert gained["jaxserve:compiles_total{phase=serving}"] == 0


def test_a_request_of_several_choices_counts_once_in_params_n(llm):
    engine = llm("tiny-llama-3.1").engine
    before = metrics(engine)
    assert len(add(engine, "choices", 5, SamplingParams(n=3, max_tokens=2))) == 3
    drain(engine)
    after = metrics(engine)
    assert after["vllm:request_params_n_sum"] - before["vllm:request_params_n_sum"] == 3
    assert after["vllm:request_params_n_count"] - before["vllm:request_params_n_count"] == 1


def test_tokens_after_a_stop_string_are_not_counted(llm):
    engine = llm("tiny-llama-3.1").engine
    before = metrics(engine)
    [request_id] = add(engine, "stop", 5, SamplingParams(temperature=0.0, max_tokens=30, stop=("x",), ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.finish(request_id, 4)
    engine.finish(request_id, 4)
    drain(engine)
    after = metrics(engine)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 4
    stop = "vllm:request_success_total{finished_reason=stop}"
    assert after[stop] - before.get(stop, 0) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_random_adds_aborts_and_steps_keep_everything_accounted(llm, depth):
    engine = llm("tiny-llama-3.1", **SCARCE, async_depth=depth).engine
    rng = random.Random(depth)
    live: list[str] = []
    preempted = 0
    for turn in range(400):
        if rng.random() < 0.3:
            params = SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(20, 60))
            live += add(engine, f"random{turn}", rng.randint(1, 100), params)
        if live and rng.random() < 0.1:
            engine.abort([live.pop(rng.randrange(len(live)))])
        if live and rng.random() < 0.05:
            engine.finish(live.pop(rng.randrange(len(live))), 1)
        engine.step()
        engine.check_integrity()
        preempted += len(engine.events[-1].preempted) if engine.events else 0
    drain(engine)
    assert preempted > 5


def test_ld18_ignore_eos_ignores_every_eos_id(llm):
    """tiny-llama-3.1 has three of them; with a neutral sampler all appear sooner or later among 512 ids."""
    model = llm("tiny-llama-3.1")
    params = SamplingParams(temperature=5.0, max_tokens=400, ignore_eos=True, seed=5, skip_special_tokens=False)
    [answer] = model.generate([1, 2, 3], params)[0].outputs
    assert len(answer.token_ids) == 400 and answer.finish_reason == "length"
    assert {513, 517, 518} & set(answer.token_ids[:-1]), "the test would show nothing without an EOS on the way"


def test_events_tell_what_each_step_did(llm):
    engine = llm("tiny-llama-3.1").engine
    engine.reset_prefix_cache()
    engine.events.clear()
    [a] = add(engine, "event-a", 70)
    drain(engine)
    kinds = [e.kind for e in engine.events]
    assert kinds == ["prefill", "prefill"] + ["decode"] * 5
    assert engine.events[0].admitted == (a,) and engine.events[-1].finished == (a,)
    assert [e.num_tokens for e in engine.events] == [64, 6] + [1] * 5
    assert all(e.padded_tokens >= e.num_tokens for e in engine.events)
    assert [e.prefill_tokens for e in engine.events] == [(64,), (6,)] + [()] * 5
    assert engine.events[0].bucket == "64 tokens" and engine.events[-1].bucket == "decode of 1"
    assert engine.events[0].queried_tokens == 70 and not any(e.cached_tokens or e.compiled for e in engine.events)
    assert all(e.schedule_seconds + e.submit_seconds + e.wait_seconds < e.collected for e in engine.events)
    shown = json.loads(to_json(engine.events))
    assert len(shown) == 7 and shown[0]["prefill_requests"] == [a] and shown[0]["prefill_tokens"] == [64]
    assert np.all(np.diff([e.collected for e in engine.events]) > 0)


def test_a_deadline_ends_an_answer_with_what_it_has(llm):
    engine = llm("tiny-llama-3.1").engine
    now = time.monotonic()
    [running] = make_requests("deadline-runs", [5] * 4, GREEDY, engine.info, deadline=now + 0.5)
    [late] = make_requests("deadline-passed", [5] * 4, GREEDY, engine.info, deadline=now - 1)
    [free] = make_requests("deadline-none", [5] * 4, GREEDY, engine.info)
    for request in (running, late, free):
        engine.add_request(request)
    first = {output.request_id: output for _, output in engine.step()}
    assert first[late.request_id].finish_reason == "length" and first[late.request_id].stop_reason == "deadline"
    assert first[running.request_id].token_ids and not first[running.request_id].finish_reason
    time.sleep(0.5)
    outputs = drain(engine)
    assert outputs[running.request_id][0].stop_reason == "deadline" and len(outputs[running.request_id]) == 1
    assert outputs[free.request_id][-1].finish_reason == "length" and outputs[free.request_id][-1].stop_reason is None


def test_all_answers_of_a_call_are_one_group_for_abort(llm):
    engine = llm("tiny-llama-3.1").engine
    ids = []
    for prompt in range(3):
        for request in make_requests(
            f"call-{prompt}", [5 + prompt] * 4, SamplingParams(n=2), engine.info, group="call"
        ):
            engine.add_request(request)
            ids.append(request.request_id)
    [other] = add(engine, "other")
    engine.step()
    ended = engine.abort_group("call")
    assert sorted(output.request_id for _, output in ended) == sorted(ids)
    assert {output.finish_reason for _, output in ended} == {"abort"}
    assert engine.abort_group("call") == engine.abort_group("unknown") == []
    assert set(drain(engine)) == {other}


def test_sc02_an_engine_that_stalls_says_so_and_why(llm, monkeypatch, caplog):
    """It must not happen; if it does, the log says what the head of the queue lacks."""
    engine = llm("tiny-llama-3.1").engine
    [stuck] = add(engine, "stuck", 40)
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: None)
    assert engine.step() == [] and engine.step() == [] and engine.stalled
    [record] = caplog.records
    assert stuck in record.message and "needs 3 of 128 blocks" in record.message
    monkeypatch.undo()
    assert drain(engine)[stuck] and not engine.stalled


def test_a_request_that_leaves_itself_no_token_harms_nobodys_cache(llm):
    engine = llm("tiny-llama-3.1").engine
    engine.reset_prefix_cache()
    assert run_once(engine, "first") == 0
    impossible = SamplingParams(max_tokens=2, allowed_token_ids=(7,), bad_words_token_ids=((7,),))
    [bad] = add(engine, "bad", 40, impossible)
    assert "no token is left" in drain(engine)[bad][-1].error
    assert run_once(engine, "again") == 32


def run_once(engine: EngineCore, name: str) -> int:
    """Runs the same request; returns its cached tokens."""
    [request_id] = add(engine, name, 40)
    return drain(engine)[request_id][0].cached_tokens
