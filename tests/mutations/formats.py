"""Of structured output and tool calls: areas SO and TC."""

from __future__ import annotations

from tests.mutations import Mutation

REPLY = "jaxserve/server/reply.py"
STRUCTURED = "jaxserve/structured.py"
TOOLS = "jaxserve/server/tools.py"

MUTATIONS = {
    # What no text can match is let in.
    "SO03": Mutation(STRUCTURED, "raise _refusal(spec, reason)\n", "pass\n"),
    # The grammar knows whole characters alone.
    "SO05": Mutation(
        STRUCTURED,
        "*map(tokenizer.token_bytes, range(vocab_size))",
        "*(tokenizer.token_text(token).encode() for token in range(vocab_size))",
    ),
    # Rows that go on with their prompts shift the masks of those behind them.
    "SO07": Mutation(
        "jaxserve/engine/constraints.py",
        "[(matcher, place) for place, _, matcher in bound]",
        "[(matcher, place) for place, (_, _, matcher) in enumerate(bound)]",
    ),
    # All answers of a schema move on in one and the same matcher.
    "SO08": Mutation(STRUCTURED, "return matcher.deep_copy()", "return matcher"),
    # What is cut gets a closing bracket.
    "SO09": Mutation(
        "jaxserve/engine/output.py",
        "self._text += self._held\n",
        'self._text += self._held + ("}" if self.sampling.structured and reason == "length" else "")\n',
    ),
    # Of arguments that come in pieces, the last is told.
    "TC01": Mutation("jaxserve/server/tool_parsers/base.py", "last.arguments += text", "last.arguments = text"),
    "TC04": Mutation(REPLY, "if not self.parallel:", "if self.parallel is None:"),
    # A call that was cut counts as complete.
    "TC08": Mutation(REPLY, " and self.parser.num_calls and not self.parser.in_call:", " and self.parser.num_calls:"),
    # Content that is absent is not content that is null.
    "TC09": Mutation(
        "jaxserve/chat_template.py",
        '_text(message.get("content"), where)',
        '_text(message.get("content", "None"), where)',
    ),
    # References within a tool's parameters point to where they were.
    "TC10": Mutation(TOOLS, "moved[key] = root + value[1:]", "moved[key] = value"),
}
