"""Log-probabilities of prompts: echoes, and the field of their own. The scripted engine gives the token of id i the
log-probability -i / 1000."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.engine.messages import Add, PromptLogprobs
from jaxserve.server.prompt_logprobs import prompt_tokens
from jaxserve.tokenizer import Tokenizer
from tests.server import openai_schemas as schemas
from tests.server.calls import CHAT, COMPLETIONS, Body, error_of, events, ok, post, stream
from tests.server.conftest import Served

LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined_logprobs(chunks: list[Body], index: int) -> Body:
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
    return {key: [entry for part in parts for entry in part[key]] for key in LOGPROB_LISTS}


def check_echo(served: Served, choice: Body, prompt_ids: list[int], prompt: str, generated: int) -> None:
    logprobs = choice["logprobs"]
    count = len(prompt_ids)
    assert {len(logprobs[key]) for key in LOGPROB_LISTS} == {count + generated}
    assert logprobs["tokens"][:count] == [served.tokenizer.token_text(token) for token in prompt_ids]
    assert logprobs["token_logprobs"][:count] == [None, *(-token / 1000 for token in prompt_ids[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert choice["text"].startswith(prompt)
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"] == sorted(logprobs["text_offset"])
    if generated:
        assert logprobs["text_offset"][count] == len(prompt)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("ids", [False, True])
def test_lp02_an_echo_with_logprobs_streamed_and_not(served: Served, max_tokens: int, n: int, ids: bool) -> None:
    served.says("la ", eos=False)
    texts = ["The river flows", "Grüße aus Zürich"]
    encoded = [served.tokenizer.encode(text) for text in texts]
    fields: Body = {"prompt": encoded if ids else texts, "echo": True, "logprobs": 1, "n": n, "max_tokens": max_tokens}
    choices = ok(post(served, COMPLETIONS, **fields))["choices"]
    chunks = stream(served, COMPLETIONS, **fields)
    assert [choice["index"] for choice in choices] == list(range(2 * n))
    for choice in choices:
        number = choice["index"] // n
        text = served.tokenizer.decode(encoded[number]) if ids else texts[number]
        check_echo(served, choice, encoded[number], text, max_tokens)
        schemas.check({"choices": [choice]}, {"properties": {"choices": schemas.completion()["properties"]["choices"]}})
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert joined_logprobs(chunks, choice["index"]) == choice["logprobs"]
        assert mine[0]["text"] == text and mine[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_lp02_an_echo_that_generates_nothing_is_computed_once_and_generates_nothing(served: Served) -> None:
    answer = ok(post(served, COMPLETIONS, echo=True, logprobs=0, max_tokens=0))
    assert answer["usage"]["completion_tokens"] == 0
    [request] = served.engine.of_kind(Add)[0].requests
    assert request.max_tokens == 0 and request.sampling.prompt_logprobs == 0
    assert answer["choices"][0]["logprobs"]["top_logprobs"][1:] == [{}] * (len(request.prompt_token_ids) - 1)


def test_lp03_tokens_of_an_echo_are_pieces_of_its_text(served_2: Served) -> None:
    """Byte for byte, though the tokenizer puts BOS and a space before it."""
    served_2.says("la ", eos=False)
    prompt = "\n2) Ida owns 35"
    [choice] = ok(post(served_2, COMPLETIONS, prompt=prompt, echo=True, logprobs=1, max_tokens=5))["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    text = choice["text"]
    count = len(served_2.tokenizer.encode(prompt))
    assert text.startswith(prompt) and len(tokens) == count + 5
    assert "".join(tokens[1:]).removeprefix(" ") == text
    for token, offset, end in zip(tokens[2:], offsets[2:], [*offsets[3:], len(text)], strict=True):
        assert text[offset:end] == token.removeprefix(" " if offset == 0 else ""), (token, offset)


def test_offsets_of_characters_split_over_tokens(llama_3: Tokenizer) -> None:
    """Each of their tokens stands where the character does or ends, never beyond the text."""
    text = "a😀b"
    ids = llama_3.encode(text)
    tokens = prompt_tokens(ids, text, [PromptLogprobs(-1.0, 1, [], [])] * (len(ids) - 1), 0, llama_3)
    offsets = [token.text_offset for token in tokens]
    assert offsets[:2] == [0, 0] and offsets[-1] == 2 and offsets == sorted(offsets)


def test_logprobs_of_an_echo_are_floored(llama_3: Tokenizer) -> None:
    entry = PromptLogprobs(float("-inf"), 9, [7, 8], [float("nan"), 1e-9])
    [first, second] = prompt_tokens([5, 6], "xy", [entry], 2, llama_3)
    assert first.logprob is None
    assert second.logprob == -9999.0 and second.top == ((7, -9999.0), (8, 0.0))


def test_the_request_of_an_evaluation_harness(served: Served) -> None:
    """lm-evaluation-harness's local-completions: it adds up a continuation's log-probabilities, and asks whether each
    was the largest of its position."""
    served.says("x", eos=False)
    prompts = [served.tokenizer.encode(text) for text in ("A B C D", "Hello there, you")]
    answer = ok(
        post(
            served, COMPLETIONS,
            model="tiny", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True,
        )
    )  # fmt: skip
    for choice, ids in zip(sorted(answer["choices"], key=lambda c: c["index"]), prompts, strict=True):
        context = len(ids) - 2
        values = choice["logprobs"]["token_logprobs"][context:-1]
        assert values == [-token / 1000 for token in ids[context:]]
        for value, top in zip(values, choice["logprobs"]["top_logprobs"][context:-1], strict=True):
            assert value in top.values() and max(top.values()) >= value


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_have_a_field_of_their_own(served: Served, route: str, top: int) -> None:
    served.says("Yes.")
    answer = ok(post(served, route, prompt_logprobs=top, max_tokens=2, return_token_ids=True))
    place = answer if route == CHAT else answer["choices"][0]
    ids, field = place["prompt_token_ids"], place["prompt_logprobs"]
    assert field[0] is None and len(field) == len(ids)
    for token, entry in zip(ids[1:], field[1:], strict=True):
        assert set(entry) == {str(token), *(str(number) for number in range(top))}
        name = served.tokenizer.token_text(token)
        if token >= top:
            assert entry[str(token)] == {"logprob": -token / 1000, "rank": 3, "decoded_token": name}
        assert [entry[str(number)]["rank"] for number in range(top) if number != token] == [
            number + 1 for number in range(top) if number != token
        ]
    assert "prompt_logprobs" not in str(ok(post(served, route)))


def test_an_echo_and_the_field_each_with_its_own_number(served: Served) -> None:
    served.says("Yes.")
    fields: Body = {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0, "prompt": [300, 301]}
    [choice] = ok(post(served, COMPLETIONS, **fields))["choices"]
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


def test_a_prompt_that_fills_the_context_can_be_scored(served: Served) -> None:
    fields: Body = {"prompt": [7] * 256, "echo": True, "logprobs": 1}
    assert len(ok(post(served, COMPLETIONS, **fields, max_tokens=0))["choices"][0]["logprobs"]["tokens"]) == 256
    assert error_of(post(served, COMPLETIONS, **fields, max_tokens=1))["code"] == "context_length_exceeded"


def test_a_fault_of_the_engine_ends_a_stream_that_waits_for_its_echo(served: Served) -> None:
    served.says_tokens([RuntimeError("broken")])
    response = post(served, COMPLETIONS, echo=True, logprobs=1, stream=True)
    [event] = events(response)
    assert event["error"]["type"]


@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_prompt_logprobs_of_the_wrong_type(served: Served, value: Any) -> None:
    assert error_of(post(served, COMPLETIONS, prompt_logprobs=value))["param"] == "prompt_logprobs"
