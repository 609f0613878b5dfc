"""Bad words as the sampler knows them: sequences of tokens."""

from __future__ import annotations

import msgspec

from jaxserve.request import MAX_BAD_WORD_TOKENS, RequestError, SamplingParams
from jaxserve.tokenizer import Tokenizer


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same parameters with ``bad_words`` split into tokens, each as it begins a text and as it follows a space.
    Raises ``RequestError`` for a word of too many tokens."""
    sequences = list(sampling.bad_words_token_ids)
    for word in sampling.bad_words:
        for text in (word.lstrip(" "), f" {word.lstrip(' ')}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words may have at most {MAX_BAD_WORD_TOKENS} tokens each, and {word[:50]!r} has {len(ids)}.",
                    param="bad_words",
                )
            if ids and ids not in sequences:
                sequences.append(ids)
    if len(sequences) == len(sampling.bad_words_token_ids):
        return sampling
    return msgspec.structs.replace(sampling, bad_words_token_ids=tuple(sequences))
