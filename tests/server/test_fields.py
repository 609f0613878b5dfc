"""Request fields and server options that shape an answer, on both routes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxserve.engine.messages import Add
from jaxserve.request import EngineRequest
from jaxserve.tokenizer import Tokenizer
from tests.server.calls import BOTH, CHAT, COMPLETIONS, USER, base, both_ways, error_of, joined, ok, post
from tests.server.calls import stream as streamed
from tests.server.conftest import CONTEXT, Served, encode_answer, serve


def sent(served: Served) -> EngineRequest:
    return served.engine.of_kind(Add)[-1].requests[0]


# ------------------------------------------------------------------ best_of


def test_va28_best_of_keeps_the_best_of_each_prompt(served: Served) -> None:
    letters = [encode_answer(served.tokenizer, letter) for letter in "abcd"]
    served.engine.script = lambda request: itertools.chain(letters[request.choice_index], [served.eos_id])
    served.engine.logprob = lambda request: [-3.0, -1.0, -4.0, -2.0][request.choice_index]
    answer = ok(post(served, COMPLETIONS, prompt=["item A", "item B"], n=2, best_of=4, echo=True))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(
        enumerate(["item Ab", "item Ad", "item Bb", "item Bd"])
    )
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 2  # all eight, of a letter and EOS
    assert all(choice["logprobs"] is None for choice in answer["choices"])


@BOTH
def test_best_of_the_same_as_n_streams(served: Served, route: str) -> None:
    served.says("ab")
    assert joined(streamed(served, route, n=2, best_of=2), 1)[0] == "ab"
    assert sent(served).sampling.logprobs is None


def test_best_of_in_chat(served: Served) -> None:
    served.says("ab")
    assert len(ok(post(served, CHAT, best_of=3))["choices"]) == 1
    assert len(served.engine.of_kind(Add)[-1].requests) == 3


# ------------------------------------------------------------------ prompts


@BOTH
def test_truncated_prompts_keep_their_end(served: Served, route: str) -> None:
    served.says("a")
    whole = ok(post(served, route)) and sent(served).prompt_token_ids
    assert ok(post(served, route, truncate_prompt_tokens=3))["usage"]["prompt_tokens"] == min(3, len(whole))
    assert sent(served).prompt_token_ids == whole[-3:]
    ok(post(served, route, truncate_prompt_tokens=CONTEXT))
    assert sent(served).prompt_token_ids == whole
    for length in (0, -2, CONTEXT + 1, "3"):
        assert error_of(post(served, route, truncate_prompt_tokens=length))["param"] == "truncate_prompt_tokens"


def test_a_prompt_truncated_to_what_fits(served: Served) -> None:
    served.says("a", eos=False)
    usage = ok(post(served, COMPLETIONS, prompt="la " * CONTEXT, truncate_prompt_tokens=-1, max_tokens=10))["usage"]
    assert usage["prompt_tokens"] == CONTEXT - 10 and usage["completion_tokens"] == 10


def test_an_echo_of_a_truncated_prompt(served: Served) -> None:
    served.says("!")
    ids = served.tokenizer.encode("Hello there")
    answer = both_ways(served, COMPLETIONS, prompt="Hello there", truncate_prompt_tokens=2, echo=True)
    assert answer[0] == served.tokenizer.decode(ids[-2:]) + "!"


def test_an_echo_in_chat_repeats_the_final_message(served: Served) -> None:
    served.says(" time.")
    messages = [*USER, {"role": "assistant", "content": "Once upon a"}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert both_ways(served, CHAT, **fields, echo=True)[0] == "Once upon a time."
    assert both_ways(served, CHAT, **fields)[0] == " time."
    assert both_ways(served, CHAT, echo=True)[0] == " time."


def test_bos_on_demand(served: Served) -> None:
    served.says("a")
    ok(post(served, COMPLETIONS, add_special_tokens=False))
    bare = sent(served).prompt_token_ids
    ok(post(served, COMPLETIONS))
    assert sent(served).prompt_token_ids == [served.tokenizer.bos_id, *bare]
    ok(post(served, CHAT))
    plain = sent(served).prompt_token_ids
    ok(post(served, CHAT, add_special_tokens=True))
    assert sent(served).prompt_token_ids == plain  # the template wrote one, and it is not doubled


# ------------------------------------------------------------------ messages


def test_the_developer_speaks_as_the_system_unless_the_template_knows_better(llama_3: Tokenizer) -> None:
    def encode(role: str) -> list[int]:
        return llama_3.encode_chat([{"role": role, "content": "Be brief."}, *USER])

    assert encode("developer") == encode("system") != encode("user")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_reach_the_template_under_both_names(name: str, checkpoints: dict[str, Any], tmp_path: Any) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer.load(checkpoints["tiny-llama-3.1"], template)
    ids = tokenizer.encode_chat([{"role": "assistant", "content": "Yes.", name: "Hm."}])
    assert tokenizer.decode(ids) == "Hm.|Hm.|Yes."


# ------------------------------------------------------------------ how tokens are shown


@BOTH
def test_tokens_by_their_ids(served: Served, route: str) -> None:
    served.says("ab", eos=False)
    ids = encode_answer(served.tokenizer, "ab")
    fields = {"logprobs": 2} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    fields |= {"max_tokens": 2, "return_tokens_as_token_ids": True}
    for choice in (ok(post(served, route, **fields))["choices"][0], *_choices(served, route, fields)[1:2]):
        logprobs = choice["logprobs"]
        if route == COMPLETIONS:
            assert logprobs["tokens"][0] == f"token_id:{ids[0]}"
            assert f"token_id:{ids[0]}" in logprobs["top_logprobs"][0]
        else:
            assert logprobs["content"][0]["token"] == f"token_id:{ids[0]}"
            assert logprobs["content"][0]["top_logprobs"][0]["token"] == f"token_id:{ids[0]}"
            assert bytes(logprobs["content"][0]["bytes"]) == b"a"


def _choices(served: Served, route: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    choices = [choice for chunk in streamed(served, route, **fields) for choice in chunk["choices"]]
    return choices if route == CHAT else [choices[0], *choices]


@BOTH
def test_token_ids_streamed_and_not(served: Served, route: str) -> None:
    served.says("Hello there")
    answer = ok(post(served, route, return_token_ids=True, max_tokens=50))
    chunks = streamed(served, route, return_token_ids=True, max_tokens=50)
    holders = [answer, *answer["choices"]]
    [prompt] = [h["prompt_token_ids"] for h in holders if "prompt_token_ids" in h]
    [again] = [h["prompt_token_ids"] for c in chunks for h in (c, *c["choices"]) if "prompt_token_ids" in h]
    assert prompt == again == sent(served).prompt_token_ids
    parts = [choice.get("token_ids", []) for chunk in chunks for choice in chunk["choices"]]
    assert [token for part in parts for token in part] == answer["choices"][0]["token_ids"]


@BOTH
@pytest.mark.parametrize("spaces", [True, False])
def test_special_tokens_are_written_as_they_are(served: Served, route: str, spaces: bool) -> None:
    bos = served.tokenizer.bos_id
    served.says_tokens([bos, bos, *encode_answer(served.tokenizer, "x"), served.eos_id])
    text, _, _ = both_ways(served, route, skip_special_tokens=False, spaces_between_special_tokens=spaces, max_tokens=9)
    assert text == "<|begin_of_text|><|begin_of_text|>x"


# ------------------------------------------------------------------ options of the server


@BOTH
def test_usage_can_be_forced(llama_3: Tokenizer, route: str) -> None:
    with serve(llama_3, 518, enable_force_include_usage=True) as served:
        served.says("Hi")
        for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
            chunks = streamed(served, route, **options)
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
            assert all("usage" not in chunk for chunk in chunks[:-1])


def test_running_usage_needs_usage(served: Served) -> None:
    served.says("Hi")
    chunks = streamed(served, CHAT, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in chunks)


@BOTH
def test_metrics_of_a_request(llama_3: Tokenizer, route: str) -> None:
    with serve(llama_3, 518, enable_per_request_metrics=True) as served:
        served.engine.step = 0.01
        served.says("word ", eos=False)
        response = post(served, route, max_tokens=11, stop="never")
        metrics = ok(response)["metrics"]
        assert metrics["time_to_first_token_ms"] >= metrics["prefill_time_ms"] >= 0
        assert 10 * 10 <= metrics["decode_time_ms"] < 1000
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["decode_time_ms"] / 10, abs=0.01)
        assert 0 < metrics["tokens_per_second"] <= 110
        timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
        assert float(timing["decode"]) == metrics["decode_time_ms"]
        chunks = streamed(served, route, max_tokens=11, stream_options={"include_usage": True})
        assert chunks[-1]["metrics"].keys() == metrics.keys()
        assert not any("metrics" in chunk for chunk in chunks[:-1])
        if route == COMPLETIONS:
            metrics = ok(post(served, route, echo=True, logprobs=0, max_tokens=0))
            assert "-0.0" not in str(metrics["metrics"]), "nothing was generated"
        # A stop string ends an answer before the engine can tell its times.
        assert ok(post(served, route, max_tokens=50, stop="word word"))["metrics"]["decode_time_ms"] > 10


def test_no_metrics_unless_wanted(served: Served) -> None:
    served.says("Hi")
    response = post(served, CHAT)
    assert "metrics" not in ok(response) and "server-timing" not in response.headers


def test_any_model_and_request_ids(llama_3: Tokenizer) -> None:
    with serve(llama_3, 518, accept_any_model=True, enable_request_id_headers=True) as served:
        served.says("Hi")
        response = post(served, CHAT, model="gpt-4o")
        assert ok(response)["model"] == "tiny"
        assert response.headers["x-request-id"].startswith("req-")
        own = served.http.post(CHAT, json=base(CHAT), headers={"X-Request-Id": "mine"})
        assert own.headers.get_list("x-request-id") == ["mine"]


def test_no_request_id_unless_sent(served: Served) -> None:
    assert "x-request-id" not in served.http.get("/version").headers
