"""From generated tokens to the text of an answer: incremental decoding, stop strings, log-probabilities.

Everything that shows an answer goes through ``ChoiceOutput``, streamed or not: an answer given at once is
the concatenation of its deltas.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from jaxserve.engine.messages import TokenLogprobs, TokenOutput
from jaxserve.request import FinishReason, SamplingParams
from jaxserve.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0
"""What OpenAI documents for a very unlikely token; JSON has no -inf."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string stands, in characters from the start of the text."""

    text: str
    start: int
    end: int


class StopMatcher:
    """Finds the first stop string in text that comes in pieces.

    One Knuth-Morris-Pratt automaton a string: the time a character takes does not depend on their length.
    If several strings end at the same character, the longest one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._length = 0

    @property
    def held(self) -> int:
        """How many of the last characters could still begin a stop string."""
        return max(self._states, default=0)

    def feed(self, piece: str) -> StopMatch | None:
        """Goes on with this text; to be called no more after a match."""
        if self._stops:
            for offset, char in enumerate(piece):
                for index, stop in enumerate(self._stops):
                    if self._advance(index, char) == len(stop):
                        end = self._length + offset + 1
                        return StopMatch(stop, end - len(stop), end)
        self._length += len(piece)
        return None

    def skip(self, piece: str) -> None:
        """Goes past this text, in which no stop string counts; to be called before any other."""
        self._length += len(piece)

    def _advance(self, index: int, char: str) -> int:
        stop, failures, state = self._stops[index], self._failures[index], self._states[index]
        while state and stop[state] != char:
            state = failures[state - 1]
        state += stop[state] == char
        self._states[index] = state
        return state


def _failures(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    failures = [0] * len(pattern)
    state = 0
    for index in range(1, len(pattern)):
        while state and pattern[index] != pattern[state]:
            state = failures[state - 1]
        state += pattern[index] == pattern[state]
        failures[index] = state
    return failures


class Token(msgspec.Struct, frozen=True):
    """One generated token as an answer shows it."""

    token_id: int
    text_offset: int
    """Where its text begins, in characters of the whole answer."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest ids and their log-probabilities, where they were asked for."""


class Delta(msgspec.Struct, frozen=True):
    """What an answer grows by: text that will never be taken back, and the tokens that begin in it."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that the request named and that ended the answer."""
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(slots=True)
class ChoiceOutput:
    """One answer as it grows. Feed it the engine's outputs until it is ``finished``.

    When ``stopped`` is set, a stop string ended the answer: tell the engine to keep ``num_tokens`` tokens.
    The engine's later outputs are ignored.
    """

    tokenizer: Tokenizer
    sampling: SamplingParams
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are in the text although others are skipped."""
    num_tokens: int = 0
    """Generated tokens that count, which are those up to the one that completed a stop string."""
    finished: bool = False
    stopped: bool = False

    _decoder: codecs.IncrementalDecoder = field(init=False)
    _matcher: StopMatcher = field(init=False)
    _match: StopMatch | None = None
    _length: int = 0
    """Characters that are certain: no stop string will cut them."""
    _held: str = ""
    """Text after those, which could still begin a stop string."""
    _held_tokens: deque[Token] = field(default_factory=deque)
    _text: str = ""
    """Certain text that no delta has carried yet; likewise the tokens."""
    _tokens: list[Token] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(self.sampling.stop)

    def feed(self, output: TokenOutput) -> Delta | None:
        """The text that has become certain, or None while there is none and the answer goes on."""
        if self.finished:
            return None
        reason = output.finish_reason
        for index, token_id in enumerate(output.token_ids):
            is_last = index == len(output.token_ids) - 1
            logprobs = None if output.logprobs is None else output.logprobs[index]
            self._add_token(token_id, logprobs, ends=is_last and reason == FinishReason.STOP)
            # After each token, so that it makes no difference how the engine groups them.
            self._settle()
            if self._match:
                break
        if self._match is None and reason is not None:
            self._add_text(self._decoder.decode(b"", final=True))
            self._settle()
        if self._match:
            self.stopped = True
            return self._finish(FinishReason.STOP, self._match.text)
        if reason is not None:
            self._text += self._held
            self._tokens += self._held_tokens
            return self._finish(reason, output.stop_reason, output.error)
        return self._take() if self._text else None  # tokens without text wait for the next text

    def _add_token(self, token_id: int, logprobs: TokenLogprobs | None, *, ends: bool) -> None:
        self.num_tokens += 1
        offset = self._length + len(self._held)
        self._held_tokens.append(_token(token_id, offset, logprobs, self.sampling.logprobs or 0))
        if ends or (
            self.sampling.skip_special_tokens and self.tokenizer.is_special(token_id) and token_id not in self.shown_ids
        ):
            return
        self._add_text(self._decoder.decode(self.tokenizer.token_bytes(token_id)))

    def _add_text(self, piece: str) -> None:
        self._held += piece
        if self.num_tokens > self.sampling.min_tokens:
            self._match = self._matcher.feed(piece)
        else:
            self._matcher.skip(piece)

    def _settle(self) -> None:
        """Moves what no stop string can cut any more from held to certain; a match decides it all."""
        if self._match:
            end = self._match.end if self.sampling.include_stop_str_in_output else self._match.start
            count = end - self._length
        else:
            count = len(self._held) - self._matcher.held
        self._text += self._held[:count]
        self._held = self._held[count:]
        self._length += count
        # A token goes with the character that it begins; one without any, once nothing is open.
        in_character = bool(self._decoder.getstate()[0])
        all_certain = not (self._match or self._held or in_character)
        while self._held_tokens and (all_certain or self._held_tokens[0].text_offset < self._length):
            self._tokens.append(self._held_tokens.popleft())

    def _finish(self, reason: str, stop_reason: int | str | None, error: str | None = None) -> Delta:
        self.finished = True
        return self._take(str(reason), stop_reason, error)

    def _take(
        self,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Delta:
        delta = Delta(self._text, tuple(self._tokens), finish_reason, stop_reason, error)
        self._text, self._tokens = "", []
        return delta


def _token(token_id: int, offset: int, logprobs: TokenLogprobs | None, num_top: int) -> Token:
    if logprobs is None:
        return Token(token_id, offset)
    pairs = list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))[:num_top]
    top = tuple((top_id, floored(value)) for top_id, value in pairs)
    return Token(token_id, offset, floored(logprobs.logprob), top)


def floored(logprob: float) -> float:
    """A log-probability that JSON can hold: NaN and -inf become the floor, rounding above 0 becomes 0."""
    return min(logprob, 0.0) if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
