"""What an answer's text says: reasoning, content and tool calls, told apart as it comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.request import FinishReason
from jaxserve.server.reasoning import ReasoningFormat, ReasoningSplitter, Thought
from jaxserve.server.tool_parsers import CallDelta, ToolParser
from jaxserve.server.tools import ToolUse

type Piece = Thought | str | CallDelta


@dataclass(slots=True)
class Reply:
    """One answer. Feed it the text; the pieces of a whole answer are those of its deltas."""

    splitter: ReasoningSplitter | None
    parser: ToolParser | None
    parallel: bool = True
    """All calls count, not only the first."""
    include_reasoning: bool = True

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """The pieces that have become certain; all that is left if this is the end of the text."""
        pieces: list[Piece] = []
        for part in self.splitter.feed(text, final=final) if self.splitter else [text] if text else []:
            if isinstance(part, str) and self.parser:
                pieces += self.parser.feed(part)
            elif isinstance(part, str) or self.include_reasoning:
                pieces.append(part)
        if final and self.parser:
            pieces += self.parser.finish()
        if not self.parallel:
            pieces = [piece for piece in pieces if not isinstance(piece, CallDelta) or piece.index == 0]
        return pieces

    @property
    def forced(self) -> bool:
        """It can hold nothing but calls (and thoughts)."""
        return self.parser is not None and self.parser.forced

    def finish_reason(self, reason: str) -> str:
        """tool_calls, where the answer stopped by itself and its calls are complete; else as it was."""
        if reason == FinishReason.STOP and self.parser and self.parser.num_calls and not self.parser.in_call:
            return "tool_calls"
        return reason


def reply_maker(
    tools: ToolUse, form: ReasoningFormat | None, prompt_end: str, *, include_reasoning: bool
) -> Callable[[], Reply] | None:
    """Makes the reply of each choice; None where text is all that an answer can be."""
    if tools.make_parser is None and form is None:
        return None

    def make() -> Reply:
        splitter = ReasoningSplitter(form, prompt_end) if form else None
        parser = tools.make_parser() if tools.make_parser else None
        return Reply(splitter, parser, tools.parallel, include_reasoning)

    return make
