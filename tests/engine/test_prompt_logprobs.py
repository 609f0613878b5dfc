"""What a prompt tells of itself: log-probabilities of its tokens and embeddings, the same however it is computed."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.admission import make_requests
from jaxserve.engine.llm import LLM
from jaxserve.engine.messages import PromptLogprobs, TokenOutput
from jaxserve.request import RequestError, SamplingParams
from jaxserve.runner import prompt_rows
from tests.conftest import ONE_CHUNK, SCARCE, SMALL, SMALL_CHUNKS
from tests.models.test_reference import DATA, TOLERANCE, recorded

NAME = "tiny-llama-3.1"
TOP = 5
OTHERS = SamplingParams(temperature=0.0, max_tokens=30)
"""Of requests that only generate."""
counter = iter(range(10**6))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check_against_reference(name: str, prompt: list[int], entries: list[PromptLogprobs]) -> None:
    """The entries of a recorded prompt at those rows of which there are stored logits."""
    assert len(entries) == len(prompt) - 1
    with np.load(DATA / f"{name}.npz") as stored:
        rows, logits = stored["prompt_rows"].tolist(), stored["prompt"]
    checked = 0
    for row, values in zip(rows, log_softmax(logits.astype(np.float64)), strict=True):
        if row + 1 == len(prompt):
            continue
        entry, token = entries[row], prompt[row + 1]
        assert abs(entry.logprob - values[token]) <= TOLERANCE, row
        assert entry.rank == 1 + (values > values[token]).sum()
        np.testing.assert_allclose(entry.top_logprobs, np.sort(values)[::-1][: len(entry.top_ids)], atol=TOLERANCE)
        np.testing.assert_allclose(entry.top_logprobs, values[entry.top_ids], atol=TOLERANCE)
        checked += 1
    assert checked >= 8


@pytest.mark.parametrize("name", [NAME, "tiny-mistral-swa", "tiny-llama-2"])
def test_prompt_logprobs_are_those_of_transformers(name, llm):
    prompt = recorded(name)["cases"][0]["prompt_ids"]
    params = SamplingParams(temperature=1.7, seed=1, max_tokens=3, prompt_logprobs=TOP)
    [output] = llm(name, **ONE_CHUNK).generate(prompt, params)
    assert output.prompt_logprobs is not None
    assert all(len(entry.top_ids) == TOP for entry in output.prompt_logprobs)
    check_against_reference(name, prompt, output.prompt_logprobs)
    assert len(output.outputs[0].tokens) == 3


def run(model: LLM, wanted: list[tuple[list[int], SamplingParams, Any]]) -> list[TokenOutput]:
    """The first outputs of requests that arrive two at a time, between others that only generate."""
    engine, waiting, first = model.engine, list(wanted), {}
    ids = []
    engine.events.clear()
    while waiting or engine.has_work():
        batch, waiting = waiting[:2], waiting[2:]
        for prompt, params, pooling in batch:
            number = next(counter)
            [request] = make_requests(f"p{number}", prompt, params, engine.info, pooling=pooling)
            [other] = make_requests(f"o{number}", prompt[:20], OTHERS, engine.info)
            ids.append(request.request_id)
            engine.add_request(request)
            engine.add_request(other)
        for _ in range(2):
            for _, output in engine.step():
                first.setdefault(output.request_id, output)
            engine.check_integrity()
    return [first[request_id] for request_id in ids]


def some_prompts() -> list[list[int]]:
    rng = random.Random(3)
    recorded_prompt = recorded(NAME)["cases"][0]["prompt_ids"]
    lengths = [1, 2, 16, 17, 33, 64, 65, 66, 120, 128]
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]
    return [recorded_prompt, *prompts, recorded_prompt, prompts[-1]]


CHANGES = [
    ({}, False),
    ({"async_depth": 2}, False),
    ({"async_depth": 2, **SCARCE}, True),
    (SMALL_CHUNKS, False),
]
WAYS = pytest.mark.parametrize(
    ("changes", "preempts"), CHANGES, ids=["batch", "depth 2", "preemption", "small blocks and chunks"]
)


@WAYS
@pytest.mark.parametrize("max_tokens", [0, 40])
def test_a_prompt_has_the_logprobs_of_its_lone_run_in_any_batch(llm, changes, preempts, max_tokens):
    """Also where its blocks are cached: the recorded prompt comes twice."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=TOP, ignore_eos=True)
    prompts = some_prompts()
    lone = [llm(NAME, **ONE_CHUNK).generate(prompt, params)[0] for prompt in prompts]
    model = llm(NAME, **changes)
    outputs = run(model, [(prompt, params, None) for prompt in prompts])
    if max_tokens:
        assert any(event.preempted for event in model.engine.events) == preempts
    for prompt, output, want in zip(prompts, outputs, lone, strict=True):
        assert output.prompt_logprobs is not None and want.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt) - 1
        assert len(output.token_ids) == min(max_tokens, 1)
        assert output.finish_reason == (None if max_tokens else "length")
        for got, expected in zip(output.prompt_logprobs, want.prompt_logprobs, strict=True):
            assert got.rank == expected.rank
            np.testing.assert_allclose(got.logprob, expected.logprob, atol=1e-4)
            np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, atol=1e-4)
    check_against_reference(NAME, prompts[0], outputs[0].prompt_logprobs or [])
    check_against_reference(NAME, prompts[0], outputs[-2].prompt_logprobs or [])


@WAYS
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_pooled_hidden_states_in_any_batch(llm, changes, preempts, pooling):
    del preempts
    prompts = some_prompts()
    params = SamplingParams(max_tokens=0)
    outputs = run(llm(NAME, **changes), [(prompt, params, pooling) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.embedding is not None and output.finish_reason == "length"
        got = np.frombuffer(output.embedding, "<f4")
        np.testing.assert_allclose(got, embedding_by_hand(llm(NAME, **ONE_CHUNK), prompt, pooling), atol=1e-5)


def embedding_by_hand(model: LLM, prompt: list[int], pooling: str) -> np.ndarray:
    """From the hidden states that a lone run leaves on the device."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    # Whose log-probabilities see to it that all of it is computed, in one step; a first token alone has none.
    model.generate(prompt if len(prompt) > 1 else prompt * 2, params)
    runner = model.engine.runner
    x = np.asarray(runner._state.hidden)[: len(prompt)].astype(np.float64)
    x /= np.sqrt((x**2).mean(-1, keepdims=True) + runner.model_config.rms_norm_eps)
    x *= np.asarray(runner._params["norm"], np.float64)
    pooled = x[-1] if pooling == "last" else x.mean(0)
    return pooled / np.linalg.norm(pooled)


def test_offline_embeddings(llm):
    one, two, again = llm(NAME).embed(["Hello there", [5, 6, 7], "Hello there"], pooling="mean")
    assert one.shape == (llm(NAME).engine.info.hidden_size,)
    np.testing.assert_allclose(np.linalg.norm([one, two]), np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(one, again, atol=1e-6)
    assert abs(one @ two) < 0.999


def test_lp14_logits_of_a_long_prompt_exist_a_slice_at_a_time(checkpoint, monkeypatch):
    """The program's temporary memory does not grow with the tokens of a step, and the start leaves room for it."""
    at_once = 16
    monkeypatch.setattr(prompt_rows, "SCORED_AT_ONCE", at_once)
    model = LLM(checkpoint(NAME), **SMALL)
    runner = model.engine.runner
    assert runner._programs.score.in_avals[0][2].shape == (2, at_once)
    temporary = runner._programs.score.memory_analysis().temp_size_in_bytes
    workspace = 0 if jax.devices()[0].platform == "cpu" else 32 << 20  # of a GPU's matrix products
    assert temporary <= 8 * 4 * at_once * runner.model_config.vocab_size + workspace
    prompt = [random.Random(5).randrange(3, 500) for _ in range(500)]
    params = SamplingParams(max_tokens=1, logprobs=5, prompt_logprobs=5)
    for output in model.generate([prompt] * 4, params):
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 499


def test_a_prompt_may_fill_the_context_where_nothing_follows(llm):
    model = llm(NAME, **ONE_CHUNK)
    full = [7] * 256
    [output] = model.generate(full, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 255
    assert output.outputs[0].finish_reason == "length" and output.outputs[0].token_ids == []
    with pytest.raises(RequestError, match="maximum context length is 256"):
        model.generate(full, SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(RequestError, match="257"):
        model.generate([*full, 7], SamplingParams(max_tokens=0, prompt_logprobs=0))


def test_prompt_logprobs_over_the_cap_are_refused(llm):
    with pytest.raises(RequestError, match="prompt_logprobs may ask for at most 20"):
        llm(NAME).generate([5, 6], SamplingParams(prompt_logprobs=21))
    with pytest.raises(ValueError, match="prompt_logprobs must not be negative"):
        SamplingParams(prompt_logprobs=-1)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, {"max_tokens": 0, "prompt_logprobs": 0}])
def test_an_embedding_is_asked_for_alone(llm, params):
    engine = llm(NAME).engine
    [request] = make_requests("e", [5, 6], SamplingParams(**params), engine.info, pooling="mean")
    with pytest.raises(RequestError, match="computed alone"):
        engine.add_request(request)
    assert not engine.has_work()


def test_a_prompt_that_gives_non_finite_values_ends_alone(llm, monkeypatch):
    """Also where only a token in the middle is broken, and beside one that is not."""
    model = llm(NAME)
    embed = model.engine.runner._params["embed"]
    broken = 400
    monkeypatch.setitem(model.engine.runner._params, "embed", embed.at[broken].set(np.nan))
    model.engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    good, bad = model.generate([[5, 6, 7], [5, broken, 7]], params)
    assert good.prompt_logprobs is not None and len(good.outputs[0].tokens) == 2
    assert bad.prompt_logprobs is None and "non-finite" in (bad.outputs[0].error or "")
    nothing = SamplingParams(max_tokens=0)
    outputs = run(model, [([5, 6, 7], nothing, "mean"), ([5, broken, 7], nothing, "mean")])
    assert outputs[0].embedding is not None and outputs[0].error is None
    assert outputs[1].embedding is None and "non-finite" in (outputs[1].error or "")
    model.engine.reset_prefix_cache()


def test_no_token_is_generated_only_where_the_prompt_is_asked(llm):
    with pytest.raises(RequestError, match="max_tokens must be between 1"):
        llm(NAME).generate([5, 6], SamplingParams(max_tokens=0))
