"""EleutherAI's lm-evaluation-harness in front of the running command: its log-likelihoods are the engine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.demo import demo_model_directory
from jaxserve.engine.llm import LLM
from jaxserve.request import SamplingParams
from tests.conftest import COMPILATION_CACHE
from tests.server.running import Server, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.demo,
    pytest.mark.filterwarnings("default"),  # the harness's own
]
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "row_buckets": (4,),
    "token_buckets": (256,),
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "num_gpu_blocks_override": 257,
}
PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " Berlin"),
    ("Question: Is the sky blue?\nAnswer:", " yes"),
    ("Question: Is the sky blue?\nAnswer:", " no"),
    ("", "It was a dark and stormy night."),
    ("北风与太阳", "谁的本领大"),
    ("word " * 200, "word word word"),
]
"""Contexts and what may follow them."""


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model_directory()


@pytest.fixture(scope="module")
def server(model: Path) -> Any:
    with serving(model, "--served-model-name", "demo", **SIZES) as running:
        yield running


@pytest.fixture(scope="module")
def own(model: Path) -> LLM:
    """The engine by itself."""
    return LLM(model, dtype="float32", compilation_cache_dir=str(COMPILATION_CACHE), **SIZES)


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
def test_local_completions_gives_the_engines_log_likelihoods(
    server: Server, own: LLM, model: Path, as_ids: bool
) -> None:
    completions = pytest.importorskip(
        "lm_eval.models.openai_completions",
        reason="lm-eval[api] and transformers are not installed",
        exc_type=ImportError,
    )
    from lm_eval.api.instance import Instance

    harness = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="demo",
        tokenizer=str(model),
        tokenizer_backend="huggingface",
        tokenized_requests=as_ids,
        num_concurrent=3,
        max_length=512,
    )
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index) for index, pair in enumerate(PAIRS)
    ]
    told = harness.loglikelihood(asked)
    assert len(told) == len(PAIRS)
    for pair, (loglikelihood, is_greedy) in zip(PAIRS, told, strict=True):
        expected, likeliest = by_hand(own, harness, *pair)
        assert loglikelihood == pytest.approx(expected, abs=1e-3), pair
        assert is_greedy == likeliest, pair
    assert told[0][0] > told[1][0], "a model that knows little would show little"


def by_hand(own: LLM, harness: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of the continuation, and whether each of its tokens is the likeliest."""
    if context:
        before, after = harness._encode_pair(context, continuation)
    else:
        before, after = [harness.prefix_token_id], harness.tok_encode(continuation, add_special_tokens=False)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    [output] = own.generate([*before, *after], params)
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[len(before) - 1 :]
    assert len(entries) == len(after)
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)
