"""From tokens to text: incremental decoding, stop strings, log-probabilities."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from jaxserve.engine.messages import TokenLogprobs, TokenOutput
from jaxserve.engine.output import ChoiceOutput, Delta, StopMatcher
from jaxserve.request import SamplingParams
from jaxserve.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module", params=["tiny-llama-3.1", "tiny-llama-2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_checkpoint(request.param, tmp_path_factory.mktemp("model")))


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte; both vocabularies have all of them."""
    table = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [table[bytes([byte])] for byte in data]


def outputs(ids: list[int], sizes: list[int], finish_reason: str | None, logprob: float = -1.0) -> list[TokenOutput]:
    """The engine's outputs for these tokens, grouped by sizes, the last group taking the rest."""
    groups, position = [], 0
    for size in sizes:
        groups.append(ids[position : position + size])
        position += size
    groups.append(ids[position:])
    return [
        TokenOutput(
            "r",
            group,
            logprobs=[TokenLogprobs(logprob, [], []) for _ in group],
            finish_reason=finish_reason if number == len(groups) - 1 else None,
        )
        for number, group in enumerate(groups)
    ]


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    sizes: list[int] | None = None,
    finish_reason: str | None = "length",
    **sampling: object,
) -> tuple[ChoiceOutput, list[Delta]]:
    choice = ChoiceOutput(tokenizer, SamplingParams(logprobs=0, **sampling))  # type: ignore[arg-type]
    sizes = [1] * (len(ids) - 1) if sizes is None else sizes
    deltas = [choice.feed(output) for output in outputs(ids, sizes, finish_reason)]
    return choice, [delta for delta in deltas if delta is not None]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


# ------------------------------------------------------------------ stop strings


def test_matcher_agrees_with_searching_the_whole_text() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=30))
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        matcher, found, position = StopMatcher(stops), None, 0
        while position < len(text) and found is None:
            size = rng.randint(1, 5)
            found = matcher.feed(text[position : position + size])
            position += size
            if found is None:  # what is held is the longest tail that begins a stop string
                seen = text[:position]
                tails = [k for stop in stops for k in range(1, len(stop)) if seen.endswith(stop[:k])]
                assert matcher.held == max(tails, default=0)
        if ends:
            end, negative = min(ends)
            assert found is not None and (found.start, found.end) == (end + negative, end)
        else:
            assert found is None


def test_matcher_takes_linear_time() -> None:
    stop = "a" * 1023 + "b"
    matcher = StopMatcher([stop] * 16)
    assert matcher.feed("a" * 100_000) is None  # minutes, if every character looked at every tail
    assert matcher.held == 1023


def test_sp01_a_stop_string_may_begin_and_end_inside_tokens(tokenizer: Tokenizer) -> None:
    text = "The capital of France is Paris, I'm sure."
    ids = tokenizer.encode(text, False)
    pieces = [tokenizer.token_text(token) for token in ids]
    full = "".join(pieces)
    for start, length in itertools.product(range(1, len(full) - 6), (1, 2, 5)):
        stop = full[start : start + length]
        cut = full.index(stop)
        choice, deltas = run(tokenizer, ids, stop=(stop,))
        assert text_of(deltas) == full[:cut]
        last = deltas[-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert choice.stopped
        # Kept: up to the token that completes the match. Shown: those that begin before the cut.
        spans = list(itertools.accumulate(map(len, pieces), initial=0))
        assert choice.num_tokens == next(i for i, end in enumerate(spans) if end >= cut + length)
        shown = [token.token_id for delta in deltas for token in delta.tokens]
        assert shown == [token for token, begin in zip(ids, spans, strict=False) if begin < cut]


def test_the_stop_string_can_stay_in_the_text(tokenizer: Tokenizer) -> None:
    ids = byte_tokens(tokenizer, b"one two three")
    choice, deltas = run(tokenizer, ids, stop=("two",), include_stop_str_in_output=True)
    assert text_of(deltas) == "one two"
    assert sum(len(delta.tokens) for delta in deltas) == choice.num_tokens == 7


def test_sp04_text_is_held_only_while_it_could_begin_a_stop(tokenizer: Tokenizer) -> None:
    ids = byte_tokens(tokenizer, b"hello ab hello abc")
    choice = ChoiceOutput(tokenizer, SamplingParams(stop=("abcd" * 50,)))
    texts = []
    for output in outputs(ids, [1] * (len(ids) - 1), "length"):
        delta = choice.feed(output)
        texts.append(delta.text if delta else "")
    assert texts == [*"hello ", "", "", "ab ", *"hello ", "", "", "abc"]


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = byte_tokens(tokenizer, b"ababab")
    for min_tokens, text in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (6, "ababab")):
        choice = ChoiceOutput(tokenizer, SamplingParams(stop=("ab",), min_tokens=min_tokens))
        deltas = [delta for output in outputs(ids, [1] * 5, "length") if (delta := choice.feed(output))]
        assert "".join(delta.text for delta in deltas) == text
        assert choice.stopped == (min_tokens < 6)


def test_after_the_end_nothing_more_is_said(tokenizer: Tokenizer) -> None:
    choice, deltas = run(tokenizer, byte_tokens(tokenizer, b"a.b.c"), stop=(".",))
    assert text_of(deltas) == "a" and choice.num_tokens == 2
    assert choice.feed(TokenOutput("r", byte_tokens(tokenizer, b"zzz"))) is None
    assert choice.num_tokens == 2


# ------------------------------------------------------------------ text


@pytest.mark.parametrize("reason", ["length", "stop", "string", "error"])
def test_st21_a_broken_tail_is_flushed_however_the_answer_ends(tokenizer: Tokenizer, reason: str) -> None:
    eos = next(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token))
    ids = byte_tokens(tokenizer, b"ab\xf0\x9f")
    if reason == "stop":
        _, deltas = run(tokenizer, [*ids, eos], finish_reason="stop")
    elif reason == "string":
        _, deltas = run(tokenizer, [*ids, *byte_tokens(tokenizer, b"!")], stop=("!",))
    else:
        _, deltas = run(tokenizer, ids, finish_reason=reason)
    assert text_of(deltas) == "ab\ufffd"
    assert all(delta.text for delta in deltas[:-1])


def test_st16_characters_split_over_tokens_come_out_whole(tokenizer: Tokenizer) -> None:
    text = "🫠 龜 สวัสดี 👨‍👩‍👧 é"
    _, deltas = run(tokenizer, byte_tokens(tokenizer, text.encode()))
    assert text_of(deltas) == text
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert all(delta.text for delta in deltas)


def test_st18_invalid_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(300):
        data = bytes(rng.choice((0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xFF)) for _ in range(12))
        _, deltas = run(tokenizer, byte_tokens(tokenizer, data))
        assert text_of(deltas) == data.decode("utf-8", "replace")


def test_tk02_spaces_stay_between_words(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox jumps", False)
    _, deltas = run(tokenizer, ids)
    assert text_of(deltas).removeprefix(" ") == "The quick brown fox jumps"


def test_tk05_the_stop_token_is_never_in_the_text(tokenizer: Tokenizer) -> None:
    ids = byte_tokens(tokenizer, b"ab#")  # an ordinary token ends the answer
    choice, deltas = run(tokenizer, ids, finish_reason="stop", skip_special_tokens=False)
    assert text_of(deltas) == "ab"
    assert choice.num_tokens == 3
    assert [token.token_id for delta in deltas for token in delta.tokens] == ids


def test_sp05_a_special_stop_token_takes_no_text_with_it(tokenizer: Tokenizer) -> None:
    eos = next(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token))
    ids = [*byte_tokens(tokenizer, b"hello"), eos]
    for skip in (True, False):
        _, deltas = run(tokenizer, ids, finish_reason="stop", skip_special_tokens=skip)
        assert text_of(deltas) == "hello"


def test_special_tokens_are_shown_on_demand(tokenizer: Tokenizer) -> None:
    special = next(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token))
    ids = [*byte_tokens(tokenizer, b"a"), special, *byte_tokens(tokenizer, b"b")]
    name = tokenizer.token_text(special)
    assert text_of(run(tokenizer, ids)[1]) == "ab"
    assert text_of(run(tokenizer, ids, skip_special_tokens=False)[1]) == f"a{name}b"


def test_grouping_of_tokens_makes_no_difference(tokenizer: Tokenizer) -> None:
    """Speculation and asynchronous steps return several tokens at once."""
    rng = random.Random(11)
    special = next(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token))
    alphabet = [*byte_tokens(tokenizer, "ab🫠".encode()), special]
    for _ in range(1500):
        ids = rng.choices(alphabet, k=14)
        stops = tuple({"".join(rng.choices("ab", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))})
        results = []
        for sizes in ([1] * 13, [], [rng.randint(0, 3) for _ in range(6)]):
            choice, deltas = run(tokenizer, ids, sizes=sizes, stop=stops)
            tokens = [token for delta in deltas for token in delta.tokens]
            last = deltas[-1]
            results.append((text_of(deltas), tokens, choice.num_tokens, last.finish_reason, last.stop_reason))
        assert results[0] == results[1] == results[2]


# ------------------------------------------------------------------ log-probabilities


def test_offsets_count_the_characters_of_the_text(tokenizer: Tokenizer) -> None:
    ids = byte_tokens(tokenizer, "é🫠a".encode())
    _, deltas = run(tokenizer, ids)
    offsets = [token.text_offset for delta in deltas for token in delta.tokens]
    assert offsets == [0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_log_probabilities_can_be_written_as_json(tokenizer: Tokenizer, value: float) -> None:
    choice = ChoiceOutput(tokenizer, SamplingParams(logprobs=1))
    delta = choice.feed(TokenOutput("r", byte_tokens(tokenizer, b"a"), [TokenLogprobs(value, [1], [value])], "length"))
    assert delta is not None
    assert delta.tokens[0].logprob == -9999.0
    assert delta.tokens[0].top == ((1, -9999.0),)
