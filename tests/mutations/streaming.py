"""Of streams and the text in them: areas ST and SP."""

from __future__ import annotations

from tests.mutations import Mutation

GENERATION = "jaxserve/server/generation.py"
OUTPUT = "jaxserve/engine/output.py"
PROTOCOL = "jaxserve/server/protocol.py"

MUTATIONS = {
    # Each chunk carries a running usage.
    "ST01": Mutation(
        PROTOCOL,
        "return self.generation.usage() if self.generation.continuous_usage else",
        "return self.generation.usage() if self.generation.include_usage else",
    ),
    # A chunk without choices ends each stream.
    "ST03": Mutation(PROTOCOL, "if self.generation.include_usage:", "if self.generation.created:"),
    # Each delta says who speaks.
    "ST05": Mutation(
        PROTOCOL, "return schemas.ChatDelta(content=piece)", 'return schemas.ChatDelta(role="assistant", content=piece)'
    ),
    "ST06": Mutation(PROTOCOL, "yield bytes(events) + dialect.done", "yield bytes(events)"),
    # However an answer ends, it stopped.
    "ST08": Mutation(
        OUTPUT,
        "return self._finish(reason, output.stop_reason",
        "return self._finish(FinishReason.STOP, output.stop_reason",
    ),
    # A prompt of several chunks is computed, and then nothing more comes.
    "ST11": Mutation(
        "jaxserve/scheduling/scheduler.py",
        "samples = end == request.num_tokens and request.max_tokens > 0",
        "samples = end == request.num_tokens and request.max_tokens > 0 and request.num_tokens < 8000",
    ),
    # Nobody looks whether the client of a plain answer is still there.
    "ST12": Mutation(
        GENERATION,
        "await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)",
        "await asyncio.wait((running,))",
    ),
    # Each token is decoded alone.
    "ST16": Mutation(
        OUTPUT,
        "self._add_text(self._decoder.decode(self.tokenizer.token_bytes(token_id)))",
        "self._add_text(self.tokenizer.token_text(token_id))",
    ),
    # Bytes that make no character become what JSON cannot hold.
    "ST18": Mutation(
        OUTPUT,
        'codecs.getincrementaldecoder("utf-8")("replace")',
        'codecs.getincrementaldecoder("utf-8")("surrogateescape")',
    ),
    # At EOS, a character that has begun is forgotten.
    "ST21": Mutation(
        OUTPUT,
        'self._decoder.decode(b"", final=True)',
        'self._decoder.decode(b"", final=reason != FinishReason.STOP)',
    ),
    "ST22": Mutation(GENERATION, "index=number * sampling.n + index", "index=index"),
    # Stop strings are found where they end with a token.
    "SP01": Mutation(
        OUTPUT,
        "if self._advance(index, char) == len(stop):",
        "if self._advance(index, char) == len(stop) and offset == len(piece) - 1:",
    ),
    # Text is held back for as long as the longest stop string.
    "SP04": Mutation(
        OUTPUT,
        "count = len(self._held) - self._matcher.held",
        "count = max(0, len(self._held) - max(map(len, self.sampling.stop), default=0))",
    ),
    # A special token that ends the answer is shown where special tokens are.
    "SP05": Mutation(
        OUTPUT,
        "ends=is_last and reason == FinishReason.STOP)",
        "ends=is_last and reason == FinishReason.STOP and not self.tokenizer.is_special(token_id))",
    ),
    "SP08": Mutation(
        "jaxserve/request.py",
        "any(not 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop)",
        "any(len(s) > MAX_STOP_LENGTH for s in self.stop)",
    ),
    "SP09": Mutation(
        OUTPUT, "end = self._match.end if self.sampling.include_stop_str_in_output else", "end = self._match.end or"
    ),
    # A further sampler turns stop strings off.
    "SP12": Mutation(
        OUTPUT, "StopMatcher(self.sampling.stop)", "StopMatcher(() if self.sampling.min_p else self.sampling.stop)"
    ),
}
