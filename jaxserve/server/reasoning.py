"""Thoughts and answer of a reasoning model, told apart as the text comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.request import Thoughts
from jaxserve.tokenizer import Tokenizer

WHITE = " \t\r\n"
TAGGED = "..."
"""Between the tags of a parser that is given as ``START...END``."""

type State = Literal["before", "inside", "content"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its thoughts."""

    start: str
    end: str
    begins_inside: bool = False
    """The answer begins with thoughts even if no tag says so."""


FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
}


def reasoning_format(name: str) -> ReasoningFormat:
    """By the names that ``--reasoning-parser`` takes, or from ``START...END``."""
    if name in FORMATS:
        return FORMATS[name]
    start, _, end = name.partition(TAGGED)
    return ReasoningFormat(start, end)


@dataclass(slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


def state_after(form: ReasoningFormat, prompt_end: str) -> State:
    """Where an answer begins: a template may have opened or closed the thoughts already. ``prompt_end`` is the text of
    the prompt's last tokens."""
    end = prompt_end.rstrip(WHITE)
    if end.endswith(form.start):
        return "inside"
    return "content" if end.endswith(form.end) else "before"


def thoughts_before(form: ReasoningFormat, prompt_end: str, tokenizer: Tokenizer) -> Thoughts | None:
    """The thoughts that an answer may or must begin with; None where the prompt has closed them."""
    state = state_after(form, prompt_end)
    if state == "content":
        return None

    def tag(text: str) -> str | int:
        token = tokenizer.token_id(text)
        return token if token is not None and tokenizer.is_special(token) else text

    return Thoughts(start=tag(form.start), end=tag(form.end), open=state == "inside" or form.begins_inside)


class ReasoningSplitter:
    """Feed it text, take pieces: thoughts, then content. White space next to a tag is layout and dropped."""

    def __init__(self, form: ReasoningFormat, prompt_end: str) -> None:
        self._form = form
        self._state: State = state_after(form, prompt_end)
        self._after_tag = self._state != "before"
        self._held = ""

    def feed(self, text: str, *, final: bool = False) -> list[Thought | str]:
        """The pieces that have become certain; all that is left if this is the end of the text."""
        self._held += text
        pieces: list[Thought | str] = []
        if self._state == "before":
            self._open(final)
        if self._state == "inside" and (thoughts := self._thoughts(final)):
            pieces.append(Thought(thoughts))
        if self._state == "content" and (content := self._take(len(self._held))):
            pieces.append(content)
        return pieces

    def _open(self, final: bool) -> None:
        start, text = self._form.start, self._held.lstrip(WHITE)
        if text.startswith(start):
            self._held = text[len(start) :]
            self._state, self._after_tag = "inside", True
        elif final or not start.startswith(text):
            self._state = "inside" if self._form.begins_inside else "content"
            self._after_tag = self._form.begins_inside

    def _thoughts(self, final: bool) -> str:
        """Thoughts up to the tag that ends them, or to where it may begin."""
        tag = self._form.end
        before, found, _ = self._held.partition(tag)
        if found:
            thoughts = self._take(len(before.rstrip(WHITE)))
            self._held = self._held.lstrip(WHITE)[len(tag) :]
            self._state, self._after_tag = "content", True
            return thoughts
        if final:
            return self._take(len(self._held))
        held = next(size for size in range(min(len(tag), len(before)), -1, -1) if before.endswith(tag[:size]))
        return self._take(len(before[: len(before) - held].rstrip(WHITE)))

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        if self._after_tag:
            text = text.lstrip(WHITE)
        self._after_tag = self._after_tag and not text
        return text
