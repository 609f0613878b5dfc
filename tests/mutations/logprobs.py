"""Of log-probabilities and tokenizers: areas LP and TK."""

from __future__ import annotations

from tests.mutations import Mutation

PROTOCOL = "jaxserve/server/protocol.py"
TOKENIZER = "jaxserve/tokenizer.py"
VALIDATE = "jaxserve/server/validate.py"

MUTATIONS = {
    # A stream has its echo where it has log-probabilities, and only there.
    "LP02": Mutation(
        PROTOCOL,
        "if self.generation.echo and self.generation.sampling.logprobs is None:",
        "if self.generation.echo and self.generation.sampling.logprobs is not None:",
    ),
    # Offsets of an echo count the BOS that the text does not show.
    "LP03": Mutation("jaxserve/server/prompt_logprobs.py", "max(end - length - excess, 0)", "max(end - length, 0)"),
    "LP05": Mutation(
        "jaxserve/engine/output.py",
        "return min(logprob, 0.0) if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR",
        "return logprob",
    ),
    "LP06": Mutation(VALIDATE, "logprobs=request.logprobs)", "logprobs=request.logprobs or None)"),
    "LP07": Mutation(
        VALIDATE, "logprobs = (top or 0) if request.logprobs else None", "logprobs = top if request.logprobs else None"
    ),
    # An alternative reads as if it followed the likeliest one.
    "LP11": Mutation(
        PROTOCOL,
        "schemas.TopLogprob(**self._token_logprob(*pair)) for pair in token.top]",
        'schemas.TopLogprob(**self._token_logprob(*pair) | {"token": self.generation.tokenizer.decode([token.top[0][0],'
        " pair[0]])}) for pair in token.top]",
    ),
    # The logits of a whole step's prompt rows are made at once.
    "LP14": Mutation(
        "jaxserve/runner/prompt_rows.py",
        "return min(SCORED_AT_ONCE, plan.max_num_batched_tokens)",
        "return plan.max_num_batched_tokens",
    ),
    "LP15": Mutation("jaxserve/server/parse.py", "raise not_supported(name)", "_report_unknown(route, name)"),
    # Words lose the spaces before them.
    "TK02": Mutation(TOKENIZER, 'return token.replace("▁", " ").encode()', 'return token.strip("▁").encode()'),
    # The token that ends an answer is in its text, unless it is a special one.
    "TK05": Mutation("jaxserve/engine/output.py", "if ends or (", "if ("),
    # No space comes after a template's [INST].
    "TK07": Mutation(
        TOKENIZER,
        "return self.encode(text, add_special_tokens)",
        'return self.encode(text.replace("[INST] ", "[INST]"), add_special_tokens)',
    ),
    # Control tokens that come apart are not noticed.
    "TK08": Mutation(TOKENIZER, "if ids != [int(token_id)]:", "if not ids:"),
}
