"""What ``LLM`` takes and gives beyond tokens, which the other tests look at."""

from __future__ import annotations

import pytest

from jaxserve.engine.llm import LLM
from jaxserve.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_prompts_in_every_spelling_and_parameters_of_each(llm):
    model = llm("tiny-llama-3.1")
    ids = model.tokenizer.encode("a word")
    prompts = ["a word", ids, {"prompt": "a word"}, {"prompt_token_ids": ids}]
    outputs = model.generate(prompts, [GREEDY, GREEDY, GREEDY, SamplingParams(temperature=0.0, max_tokens=2)])
    assert [output.prompt for output in outputs] == ["a word", None, "a word", None]
    assert len({output.request_id for output in outputs}) == 4
    first = outputs[0].outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in outputs] == [first, first, first, first[:2]]
    [alone] = model.generate({"prompt_token_ids": ids}, GREEDY)
    assert alone.prompt_token_ids == ids and alone.outputs[0].token_ids == first


def test_what_an_answer_says_of_itself(llm):
    model = llm("tiny-llama-3.1")
    model.engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    prompt = list(range(3, 43))
    first, again = (model.generate(prompt, params)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    [answer] = first.outputs
    assert answer.cumulative_logprob == pytest.approx(sum(token.logprob for token in answer.tokens))
    assert model.generate(prompt, GREEDY)[0].outputs[0].cumulative_logprob is None


def test_long_answers_begin_first(llm, monkeypatch):
    """Of several that may be as long, the first; answers come in the order of the prompts."""
    model = llm("tiny-llama-3.1")
    added = []
    add = model.engine.add_request
    monkeypatch.setattr(model.engine, "add_request", lambda request: (added.append(request), add(request)))
    limits = [2, 5, 3, 5]
    params = [SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True) for limit in limits]
    outputs = model.generate([[10 + i] * 3 for i in range(4)], params)
    assert [request.prompt_token_ids[0] for request in added] == [11, 13, 12, 10]
    assert [output.prompt_token_ids[0] for output in outputs] == [10, 11, 12, 13]
    assert [len(output.outputs[0].token_ids) for output in outputs] == limits


def test_one_stop_string_is_one_string():
    assert SamplingParams(stop="END", bad_words="no").stop == ("END",)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda model: model.generate(["a", "b"], [GREEDY]), "2 prompts need as many sampling_params"),
        (lambda model: model.generate({"text": "a"}, GREEDY), 'has "prompt" or "prompt_token_ids"'),
        (lambda model: model.chat([{"role": "user", "content": "a"}], temperature=0.0), "temperature: fields of Sampl"),
        (lambda model: model.chat("a"), "a conversation is a list of messages"),
        (lambda model: LLM("demo", max_modle_len=64), "max_modle_len"),
        (lambda model: LLM("/nowhere"), "/nowhere is not a directory; --model takes"),
    ],
)
def test_mistakes_are_named(llm, call, error):
    with pytest.raises((TypeError, ValueError), match=error):
        call(llm("tiny-llama-3.1"))


def test_an_engine_that_stalls_does_not_spin(llm, monkeypatch):
    model = llm("tiny-llama-3.1")
    monkeypatch.setattr(model.engine.scheduler, "schedule", lambda: None)
    with pytest.raises(RuntimeError, match=r"the engine stalls: offline-.* needs"):
        model.generate("a word", GREEDY)
    assert not model.engine.has_work() and not model.engine.stalled
