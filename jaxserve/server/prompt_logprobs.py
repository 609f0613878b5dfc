"""How the log-probabilities of a prompt's tokens are told: before an echo's, and as the field prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from itertools import accumulate

from jaxserve.engine.messages import PromptLogprobs
from jaxserve.engine.output import Token, floored
from jaxserve.server import schemas
from jaxserve.tokenizer import Tokenizer


def prompt_tokens(
    token_ids: Sequence[int], text: str, entries: Sequence[PromptLogprobs] | None, top: int, tokenizer: Tokenizer
) -> list[Token]:
    """The tokens of an echoed prompt, which reads ``text``. The first has no log-probability; nor have others where
    the answer ended before they were computed (``entries`` None)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(tokenizer.token_bytes(token))) for token in token_ids]
    ends = list(accumulate(lengths))
    # A BOS that the tokenizer adds, or the space before the first word, comes before the text as the client knows it.
    excess = ends[-1] + len(decoder.decode(b"", final=True)) - len(text)
    offsets = [min(max(end - length - excess, 0), len(text)) for end, length in zip(ends, lengths, strict=True)]
    first, *rest = zip(token_ids, offsets, strict=True)
    tokens = [Token(*first)]
    for number, (token_id, offset) in enumerate(rest):
        if entries is None:
            tokens.append(Token(token_id, offset))
            continue
        entry = entries[number]
        pairs = tuple(zip(entry.top_ids, map(floored, entry.top_logprobs), strict=True))[:top]
        tokens.append(Token(token_id, offset, floored(entry.logprob), pairs))
    return tokens


def prompt_field(
    token_ids: Sequence[int], entries: Sequence[PromptLogprobs], top: int, name: Callable[[int], str]
) -> list[dict[str, schemas.PromptLogprob] | None]:
    """The field: for each token but the first itself and the likeliest in its place, by their ids."""
    field: list[dict[str, schemas.PromptLogprob] | None] = [None]
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        ranked = [(token_id, entry.logprob, entry.rank)]
        ranked += zip(entry.top_ids[:top], entry.top_logprobs[:top], range(1, top + 1), strict=False)
        shown: dict[str, schemas.PromptLogprob] = {}
        for shown_id, logprob, rank in ranked:
            value = schemas.PromptLogprob(logprob=floored(logprob), rank=rank, decoded_token=name(shown_id))
            shown.setdefault(str(shown_id), value)
        field.append(shown)
    return field
