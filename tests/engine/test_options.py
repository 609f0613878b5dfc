"""Penalties, biases, allowed ids, bad words, min_tokens and masks: what each does to an answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.admission import make_requests
from jaxserve.engine.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.runner import compiles
from jaxserve.scheduling.schedule import RowSampling, ScheduledRequest, SchedulerOutput

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def model(request: pytest.FixtureRequest, llm) -> LLM:
    return llm("tiny-llama-3.1", async_depth=request.param)


def answer(model: LLM, prompt: list[int] = PROMPT, **sampling: Any) -> list[int]:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    [output] = model.generate([prompt], SamplingParams(**params))[0].outputs
    assert output.error is None
    return output.token_ids


def logits_after(model: LLM, tokens: list[int]) -> np.ndarray:
    """Float64 logits of what follows; the engine must be idle."""
    blocks = list(range(1, len(tokens) // model.engine.runner.plan.block_size + 2))
    row = ScheduledRequest("", 0, tokens, len(tokens), True, blocks, False, RowSampling(SamplingParams(), 0, 0))
    return model.engine.runner.logits(SchedulerOutput(prefill=[row]))[0].astype(np.float64)


def greedy_by_hand(model: LLM, prompt: list[int], count: int, adjust) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(adjust(logits_after(model, tokens), tokens).argmax()))
    return tokens[len(prompt) :]


def repeated(logits: np.ndarray, tokens: list[int], penalty: float) -> np.ndarray:
    ids = list(set(tokens))
    logits[ids] = np.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
    return logits


def test_nu08_presence_and_frequency_count_generated_tokens_alone(model):
    """The prompt's only token against the one that is hardly less likely: no penalty makes the first token that one."""
    [repeated_token] = answer(model, max_tokens=1)
    prompt = [repeated_token] * 6
    logits = logits_after(model, prompt)
    below = np.where(logits < logits[repeated_token], logits, -np.inf)
    assert logits[repeated_token] - below.max() < 0.5
    two = {"allowed_token_ids": (repeated_token, int(below.argmax())), "max_tokens": 1}
    for options in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert answer(model, prompt, **two, **options) == [repeated_token]
    assert answer(model, prompt, **two, repetition_penalty=4.0) != [repeated_token]

    def frequency(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
        for token, count in Counter(tokens[len(prompt) :]).items():
            logits[token] -= 0.5 + 0.25 * count
        return logits

    got = answer(model, prompt, presence_penalty=0.5, frequency_penalty=0.25)
    assert got == greedy_by_hand(model, prompt, 12, frequency)
    got = answer(model, prompt, repetition_penalty=1.3)
    assert got == greedy_by_hand(model, prompt, 12, lambda logits, tokens: repeated(logits, tokens, 1.3))
    assert got != answer(model, prompt)


def test_log_probabilities_are_those_of_the_model(model):
    [[output]] = [
        result.outputs
        for result in model.generate(
            [PROMPT], SamplingParams(temperature=0.0, max_tokens=1, logprobs=3, logit_bias={9: 100.0})
        )
    ]
    logits = logits_after(model, PROMPT)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert output.token_ids == [9]
    np.testing.assert_allclose(output.tokens[0].logprob, logprobs[9], atol=1e-4)
    assert [token for token, _ in output.tokens[0].top] == np.argsort(-logits)[:3].tolist()


def test_logit_bias_forces_and_forbids(model):
    plain = answer(model)
    assert answer(model, logit_bias={33: 100.0}) == [33] * 12
    assert plain[0] not in answer(model, logit_bias={plain[0]: -100.0})


def test_allowed_token_ids(model):
    allowed = (3, 31, 32, 63, 64, model.engine.info.vocab_size - 1)
    assert set(answer(model, allowed_token_ids=allowed, max_tokens=40, temperature=5.0, seed=1)) == set(allowed)
    assert answer(model, allowed_token_ids=(40,)) == [40] * 12


@pytest.mark.parametrize("length", range(1, 9))
def test_bad_words_of_up_to_eight_tokens(model, length):
    """A word that the answer begins with does not come to its end, and begins as before."""
    plain = answer(model, logit_bias={11: 100.0, 12: 80.0})
    assert plain == [11] * 12
    got = answer(model, logit_bias={11: 100.0, 12: 80.0}, bad_words_token_ids=((11,) * length,))
    assert got == ([11] * (length - 1) + [12]) * (12 // length) + [11] * (12 % length)


def test_bad_words_look_at_the_answer_alone(model):
    got = answer(model, [11, 11, 11], logit_bias={11: 100.0}, bad_words_token_ids=((11, 11, 11),))
    assert got[:2] == [11, 11] and got[2] != 11


def test_bad_words_as_text(model):
    word = "the"
    sequences = {tuple(model.tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")}
    likely = {token: 20.0 for ids in sequences for token in ids}
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "logit_bias": likely}
    assert word in model.tokenizer.decode(answer(model, **options))
    got = answer(model, bad_words=(word,), **options)
    for ids in sequences:
        assert not any(tuple(got[at : at + len(ids)]) == ids for at in range(len(got)))


def test_min_tokens_puts_off_stop_tokens_and_eos(model):
    eos = next(iter(model.engine._eos_ids))
    bias = {17: 100.0, eos: 80.0, 18: 60.0}
    for ignore_eos, expected in ((True, [18] * 5 + [17]), (False, [18] * 5 + [17])):
        got = answer(model, stop_token_ids=(17, eos), min_tokens=5, logit_bias=bias, ignore_eos=ignore_eos)
        assert got == expected
    got = answer(model, min_tokens=5, logit_bias={eos: 100.0, 18: 80.0}, ignore_eos=False)
    assert got == [18] * 5 + [eos]


def test_a_request_for_which_no_token_is_left_ends_alone(model):
    good = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    bad = SamplingParams(max_tokens=8, allowed_token_ids=(30,), bad_words_token_ids=((30, 30),))
    requests = [
        *make_requests("good", PROMPT, good, model.engine.info),
        *make_requests("bad", PROMPT, bad, model.engine.info),
    ]
    for request in requests:
        model.engine.add_request(request)
    outputs: dict[str, list] = {"good-0": [], "bad-0": []}
    while model.engine.has_work():
        for _, output in model.engine.step():
            outputs[output.request_id].append(output)
    assert [o.token_ids for o in outputs["bad-0"]] == [[30], []]
    assert "no token is left" in outputs["bad-0"][-1].error
    assert [token for o in outputs["good-0"] for token in o.token_ids] == answer(model, max_tokens=8)


def test_a_slot_forgets_the_options_of_its_last_request(model):
    plain = answer(model)
    answer(model, logit_bias={33: 100.0}, allowed_token_ids=(33,), frequency_penalty=2.0)
    both = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **o) for o in ({}, {"logit_bias": {1: 0.5}})
    ]
    requests = [r for i, p in enumerate(both) for r in make_requests(f"r{i}", PROMPT, p, model.engine.info)]
    for request in requests:
        model.engine.add_request(request)
    answers: dict[str, list[int]] = {}
    while model.engine.has_work():
        for _, output in model.engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert answers["r0-0"] == plain, "in a step with options, but without any of its own"


def test_a_mask_from_outside(llm):
    """What a grammar will give: a bit a token, for one row of two."""
    model = llm("tiny-llama-3.1")
    runner = model.engine.runner
    before = compiles.counts()
    rows = [
        ScheduledRequest(
            "", slot, PROMPT, 4, True, [slot + 1], False, RowSampling(SamplingParams(temperature=0.0), 0, 0)
        )
        for slot in range(2)
    ]
    mask = np.full((2, -(-model.engine.info.vocab_size // 32)), -1, np.int32)
    mask[1] = 0
    mask[1, 2] = 1 << 5 | -(1 << 31)  # 69 and 95
    step = runner.submit(SchedulerOutput(prefill=rows), masked=True)
    assert not step.is_sampled
    step.sample(mask)
    tokens = [row.token_ids for row in step.result().rows]
    assert tokens[0] == answer(model, max_tokens=1)
    logits = logits_after(model, PROMPT)
    assert tokens[1] == [69 if logits[69] > logits[95] else 95]
    assert compiles.counts() == before
