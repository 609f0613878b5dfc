"""A script for the fake engine: answers drawn at random from what a request's grammar allows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.request import EngineRequest
from jaxserve.structured import Grammars
from jaxserve.tokenizer import Tokenizer
from tests.fake_engine import Script

CLOSING = (b'"', b"}", b"]")


def obedient(tokenizer: Tokenizer, eos_id: int, begin: Sequence[int] = ()) -> Script:
    """``begin``: tokens that each answer begins with, which its grammar must allow."""
    grammars = Grammars(lambda: tokenizer)

    def script(request: EngineRequest) -> Iterator[int]:
        assert request.sampling.structured is not None
        matcher = grammars.compile(request.sampling.structured).result()
        for token in begin:
            assert matcher.consume_token(token)
            yield token
        rng = random.Random(request.sampling.structured.value)
        while not (matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.3)):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: tokenizer.vocab_size]).tolist()
            dark = [token for token in allowed if tokenizer.token_bytes(token).strip()] or allowed
            closing = [token for token in dark if tokenizer.token_bytes(token) in CLOSING]
            token = rng.choice(closing if closing and rng.random() < 0.4 else dark)
            assert matcher.consume_token(token)
            yield token
        yield from itertools.repeat(eos_id)

    return script
