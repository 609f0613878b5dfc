"""The models give what transformers gave (tests/data), through the paged path."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.llm import LLM, Completion
from jaxserve.request import SamplingParams
from jaxserve.runner.programs import ProgramBuilder
from jaxserve.runner.runner import ModelRunner
from jaxserve.scheduling.schedule import ScheduledRequest, SchedulerOutput
from pallas_kernels import dispatch
from tests.checkpoints import NAMES
from tests.conftest import ONE_CHUNK, SMALL
from tests.models import split_products

DATA = Path(__file__).parent.parent / "data"
TOLERANCE = 1e-3
CLOSE_CALL = 0.1
"""bfloat16 may choose another token where the two best logits are nearer than this."""


def recorded(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return value


def run_chunks(runner: ModelRunner, token_ids: list[int], ends: list[int]) -> np.ndarray:
    """Logits ``[len(ends), V]`` after each chunk of a sequence; its blocks lie scattered in the pool."""
    block_size = runner.plan.block_size
    blocks = list(range(runner.num_blocks - 1, 0, -3))
    logits = []
    for start, end in pairwise([0, *ends]):
        item = ScheduledRequest(
            request_id="by hand",
            slot=1,
            token_ids=token_ids[start:end],
            seq_len=end,
            samples=True,
            new_blocks=blocks[-(-start // block_size) : -(-end // block_size)],
            wants_logprobs=False,
            sampling=None,
        )
        goes_on = start > 0 and end - start == 1
        schedule = SchedulerOutput(decode=[item]) if goes_on else SchedulerOutput(prefill=[item])
        logits.append(runner.logits(schedule)[0])
    return np.stack(logits)


def chunkings(length: int) -> dict[str, list[int]]:
    """Where chunks end: on the edges of blocks, just beside them, and in the middle."""
    return {
        "in one chunk": [length],
        "in blocks": [*range(16, length, 16), length],
        "unevenly": [1, 2, 9, 31, 33, 64, 95, length],
        "token by token": list(range(1, length + 1)),
    }


def check_logits(runner: ModelRunner, prompt: list[int], rows: dict[int, np.ndarray], step: str) -> None:
    """``rows``: expected logits after the token of that index."""
    for how, ends in chunkings(len(prompt)).items():
        logits = run_chunks(runner, prompt, ends)
        seen = [(end - 1, got) for end, got in zip(ends, logits, strict=True) if end - 1 in rows]
        assert seen
        for index, got in seen:
            error = np.abs(got - rows[index]).max()
            assert error <= TOLERANCE, f"{step}, {how}: row {index} is off by {error}"


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, llm):
    """The stored rows of a 96-token prompt however it is cut, each row as the end of a chunk, and every first step."""
    runner = llm(name, **ONE_CHUNK).engine.runner
    cases = recorded(name)["cases"]
    with np.load(DATA / f"{name}.npz") as stored:
        rows = dict(zip(stored["prompt_rows"].tolist(), stored["prompt"], strict=True))
        first = stored["first"]
    check_logits(runner, cases[0]["prompt_ids"], rows, "case 0")
    got = run_chunks(runner, cases[0]["prompt_ids"], [row + 1 for row in rows])
    np.testing.assert_allclose(got, np.stack(list(rows.values())), atol=TOLERANCE, rtol=0)
    for case, expected in zip(cases, first, strict=True):
        got = run_chunks(runner, case["prompt_ids"], [len(case["prompt_ids"])])[0]
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


def check_greedy(model: LLM, cases: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    model.engine.reset_prefix_cache()  # ``run_chunks`` writes into blocks without asking whose they are
    longest = max(len(case["generated_ids"]) for case in cases)
    params = SamplingParams(temperature=0.0, max_tokens=longest, logprobs=0)
    outputs = model.generate([case["prompt_ids"] for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        [answer] = output.outputs
        assert answer.token_ids == case["generated_ids"]
        assert answer.finish_reason == case["finish"]
        logprobs = [token.logprob for token in answer.tokens]
        np.testing.assert_allclose(logprobs, case["chosen_logprobs"], atol=tolerance, rtol=0)
        if "\ufffd" not in case.get("text", "\ufffd"):  # how many of them broken bytes give is a matter of taste
            assert answer.text == case["text"]


@pytest.mark.parametrize(
    ("name", "kinds"), [("tiny-llama-3.1", {"parts", "gated", "whole"}), ("tiny-llama-bias", {"whole"})]
)
def test_products_in_partial_sums(name, kinds, llm, monkeypatch):
    """What a GPU's kernels leave to norm and rotary embedding to add up; products with a bias stay XLA's."""
    for operation in ("suits_linear", "linear_parts", "linear", "gated_linear"):
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS[operation], "split", split_products.__name__)
    split_products.calls.clear()
    runner = llm(name, **ONE_CHUNK).engine.runner
    plan = replace(runner.plan, linear_backend="split")
    builder = ProgramBuilder(runner.model_config, plan, runner._params, runner._mesh, runner.num_blocks)
    forward = {bucket: builder.forward(bucket).compile() for bucket in plan.ladder.all()}
    monkeypatch.setattr(runner, "_programs", replace(runner._programs, forward=forward))
    assert set(split_products.calls) == kinds
    with np.load(DATA / f"{name}.npz") as stored:
        rows = dict(zip(stored["prompt_rows"].tolist(), stored["prompt"], strict=True))
    check_logits(runner, recorded(name)["cases"][0]["prompt_ids"], rows, "case 0")


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name, llm):
    check_greedy(llm(name, **ONE_CHUNK), recorded(name)["cases"])


def test_greedy_tokens_in_bfloat16(llm):
    """Ids and log-probabilities up to the first close call; after it the texts may part."""
    cases = recorded("tiny-mistral-swa")["cases"]
    model = llm("tiny-mistral-swa", dtype="bfloat16", **ONE_CHUNK)
    params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=0)
    compared = 0
    for case, output in zip(cases, model.generate([c["prompt_ids"] for c in cases], params), strict=True):
        gaps = case["top2_logit_gaps"]
        sure = next((step for step, gap in enumerate(gaps) if gap < CLOSE_CALL), len(gaps))
        tokens = output.outputs[0].tokens[:sure]
        assert [token.token_id for token in tokens] == case["generated_ids"][:sure]
        np.testing.assert_allclose([t.logprob for t in tokens], case["chosen_logprobs"][:sure], atol=0.3, rtol=0)
        compared += sure
    assert compared > 50


# ---------------------------------------------------------------------------- checkpoints beside the checkout


@pytest.mark.parametrize("name", NAMES)
def test_stored_checkpoints(name):
    """The full references and the files they were made from; JAXSERVE_TEST_MODELS names their folder."""
    folder = os.environ.get("JAXSERVE_TEST_MODELS")
    if not folder:
        pytest.skip("JAXSERVE_TEST_MODELS is not set")
    directory = Path(folder) / name
    model = LLM(directory, **{**SMALL, **ONE_CHUNK})
    runner = model.engine.runner
    cases = json.loads((directory / "golden.json").read_text(encoding="utf-8"))["cases"]
    with np.load(directory / "golden_logits.npz") as stored:
        check_logits(runner, cases[0]["prompt_ids"], dict(enumerate(stored["case0_prompt"])), "case 0")
        for number, case in enumerate(cases):
            got = run_chunks(runner, case["prompt_ids"], [len(case["prompt_ids"])])[0]
            np.testing.assert_allclose(got, stored[f"case{number}_first"], atol=TOLERANCE, rtol=0)
    check_greedy(model, cases)


# ---------------------------------------------------------------------------- the demo model


@pytest.fixture(scope="module")
def demo() -> LLM:
    """SmolLM2-135M-Instruct with little memory and three forward programs."""
    options = {
        **SMALL,
        **ONE_CHUNK,
        "max_model_len": 1024,
        "kv_cache_memory": 64 << 20,
        "num_gpu_blocks_override": None,
    }
    return LLM("demo", **options)


def check_demo(case: dict[str, Any], answer: Completion) -> None:
    assert answer.token_ids == case["generated_ids"]
    assert answer.text == case["text"]
    assert answer.finish_reason == case.get("finish", "length")
    logprobs = [token.logprob for token in answer.tokens]
    np.testing.assert_allclose(logprobs, case["chosen_logprobs"], atol=TOLERANCE, rtol=0)


@pytest.mark.demo
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_demo_answers(demo, kind):
    """From messages and from text, so that template and tokenizer count too."""
    cases = [case for case in recorded("smollm2-135m-instruct")["cases"] if case["kind"] == kind]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)
    if kind == "chat":
        outputs = demo.chat([case["messages"] for case in cases], params)
    else:
        outputs = demo.generate([case["prompt"] for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        check_demo(case, output.outputs[0])


@pytest.mark.demo
def test_demo_continues_a_long_prompt(demo):
    case = recorded("smollm2-135m-instruct")["long"]
    params = SamplingParams(temperature=0.0, max_tokens=len(case["generated_ids"]), logprobs=0)
    check_demo(case, demo.generate(case["prompt_ids"], params)[0].outputs[0])
