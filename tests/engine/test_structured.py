"""Answers held to a grammar, in the engine: valid whatever the batch, chunks, depth or preemptions, and nobody else's
business."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher

from jaxserve.engine.admission import make_requests
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.core import EngineCore
from jaxserve.engine.llm import LLM
from jaxserve.request import RequestError, SamplingParams, StructuredSpec, Thoughts
from jaxserve.runner.runner import ModelRunner, PendingStep
from tests.conftest import ONE_CHUNK, SCARCE, SMALL_CHUNKS
from tests.engine.test_core import add, drain, metrics
from tests.engine.test_invariance import Work, run, some_work
from tests.scheduling.factories import make_request

MODELS: dict[str, dict[str, Any]] = {"tiny-llama-3.1": {}, "tiny-llama-2": ONE_CHUNK}
BOTH = pytest.mark.parametrize("name", MODELS)
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "größe": {"enum": ["北风", "Fjällräv", "🦊"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["größe", "tags", "n"],
    "additionalProperties": False,
}


def spec(kind: Any, value: Any = "") -> StructuredSpec:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return StructuredSpec(kind=kind, value=text, field="response_format")


def held(kind: Any, value: Any = "", **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, "seed": 1, **options}, structured=spec(kind, value))


def valid(text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def answer(model: LLM, params: SamplingParams, prompt: list[int] | None = None) -> tuple[str, str | None]:
    [choice] = model.generate(prompt or [5, 6, 7], params)[0].outputs
    assert choice.error is None
    return choice.text, choice.finish_reason


@BOTH
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_p": 0.5, "min_tokens": 3}])
def test_so05_the_answer_matches(llm, name, options):
    model = llm(name, **MODELS[name])
    text, reason = answer(model, held("json", SCHEMA, **options))
    assert reason == "stop" and valid(text)
    enum = ["北风", "Fjällräv", "🦊"]
    assert answer(model, held("choice", enum, **options))[0] in enum
    assert json.loads(answer(model, held("json", {"enum": enum}, **options))[0]) in enum
    assert re.fullmatch(r"[ab]{3}-\d{2}", answer(model, held("regex", r"[ab]{3}-\d{2}", **options))[0])
    assert re.fullmatch(r"x[0-9]{4}", answer(model, held("grammar", 'root ::= "x" [0-9]{4}', **options))[0])
    assert answer(model, held("json_object", max_tokens=20, **options))[0].lstrip().startswith("{")


@BOTH
def test_penalties_biases_and_logprobs_go_together_with_a_grammar(llm, name):
    model = llm(name, **MODELS[name])
    a, b = (
        [token for token in range(model.tokenizer.vocab_size) if set(model.tokenizer.token_bytes(token)) == set(letter)]
        for letter in (b"a", b"b")
    )
    biases = dict.fromkeys(a, 50.0)
    assert answer(model, held("regex", "[ab]{9}", temperature=0.0, logit_bias=biases)) == ("a" * 9, "stop")
    assert answer(model, held("regex", "[ab]{4}", allowed_token_ids=tuple(b))) == ("bbbb", "stop")
    params = held("regex", "[ab]{9}", presence_penalty=1.0, repetition_penalty=1.3, bad_words=("bb",), logprobs=2)
    [choice] = model.generate([5, 6, 7], params)[0].outputs
    assert re.fullmatch("[ab]{9}", choice.text) and all(len(token.top) == 2 for token in choice.tokens)


@DEPTHS
def test_a_grammar_waits_for_the_end_of_thoughts(llm, depth):
    """Which are the tokens of a plain answer up to there."""
    model = llm("tiny-llama-3.1", async_depth=depth)
    texts = {token: model.tokenizer.token_bytes(token) for token in range(512)}
    allowed = tuple(token for token, text in texts.items() if re.fullmatch(rb"[ -~]+", text))
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, allowed_token_ids=allowed)
    [plain] = model.generate([5, 6, 7], params)[0].outputs
    said = [texts[token] for token in plain.token_ids]
    count = next(n for n in range(10, 60) if said[n] not in b"".join(said[:n]))
    thoughts = Thoughts(start="<think>", end=said[count].decode(), open=True)
    after = msgspec.structs.replace(spec("regex", "[ab]{3}-[0-9]{2}"), thoughts=thoughts)
    [choice] = model.generate([5, 6, 7], msgspec.structs.replace(params, max_tokens=None, structured=after))[0].outputs
    assert choice.token_ids[: count + 1] == plain.token_ids[: count + 1] and choice.finish_reason == "stop"
    assert re.fullmatch(rb"\s*[ab]{3}-\d{2}", b"".join(map(texts.get, choice.token_ids[count + 1 :])))


def test_an_answer_ends_where_the_grammar_ends_or_lets_it(llm):
    """EOS and stop tokens may come only where the grammar may end, however likely they are."""
    model = llm("tiny-llama-3.1")
    eos, a = 517, model.tokenizer.encode("a", add_special_tokens=False)[-1]
    pushed = {"logit_bias": {eos: 100.0}, "temperature": 0.0}
    assert answer(model, held("regex", "a{3,5}", **pushed)) == ("aaa", "stop")
    assert answer(model, held("regex", "a{3,5}", **pushed, min_tokens=5)) == ("aaaaa", "stop")
    assert answer(model, held("regex", "a{3,5}", **pushed, ignore_eos=True)) == ("aaaaa", "stop")
    assert answer(model, held("regex", "a+", **pushed, ignore_eos=True, max_tokens=30))[1] == "length"
    stopping = {"temperature": 0.0, "stop_token_ids": (100,), "logit_bias": {100: 100.0}, "ignore_eos": True}
    assert answer(model, held("regex", "a{3,5}", **stopping)) == ("aaa", "stop")
    assert answer(model, held("regex", "a{3,5}", temperature=0.0, stop_token_ids=(a,))) == ("", "stop")


def test_so03_offline_a_bad_schema_raises_before_anything_runs(llm):
    model = llm("tiny-llama-3.1")
    with pytest.raises(RequestError, match="response_format: the JSON Schema cannot be used"):
        model.generate([[5]], held("json", {"type": "nothing"}))
    assert not model.engine.has_work()


@BOTH
def test_so09_max_tokens_cuts_the_text_and_says_so(llm, name):
    """Also within a character."""
    model = llm(name, **MODELS[name])
    for params in (held("json", SCHEMA), held("choice", ["🦊🦊🦊🦊🦊🦊"])):
        [whole] = model.generate([5, 6, 7], params)[0].outputs
        for count in (1, 2, 5):
            [cut] = model.generate([5, 6, 7], held(params.structured.kind, params.structured.value, max_tokens=count))[
                0
            ].outputs
            assert cut.token_ids == whole.token_ids[:count] and cut.finish_reason == "length" and cut.error is None
            assert whole.text.startswith(cut.text.rstrip("�"))


def mixed_work(vocab_size: int) -> list[Work]:
    """Prompts of up to four chunks; every other answer is held to something."""
    work = some_work(vocab_size, 12, seed=3)
    specs = [("json", SCHEMA), ("regex", "([abc]|🦊){20,30}"), ("json_object", "")]
    for i, item in enumerate(work[::2]):
        params = held(*specs[i % 3], max_tokens=40, temperature=[0.0, 1.0][i % 2], logprobs=1)
        work[2 * i] = Work(item.prompt, params)
    return work


@pytest.fixture(scope="module")
def lone(llm) -> list[Work]:
    engine = llm("tiny-llama-3.1", **ONE_CHUNK).engine
    work = mixed_work(engine.info.vocab_size)
    for item in work:
        run(engine, [item], stagger=False)
    return work


@pytest.mark.parametrize(
    ("changes", "preempts"),
    [
        ({"async_depth": 1}, False),
        ({"async_depth": 2}, False),
        ({"async_depth": 1, **SCARCE}, True),
        ({"async_depth": 2, **SCARCE}, True),
        ({"async_depth": 2, **SMALL_CHUNKS}, False),
    ],
    ids=["depth 1", "depth 2", "preemption", "preemption at depth 2", "small blocks and chunks"],
)
def test_so07_the_tokens_are_those_of_the_lone_run(lone, llm, changes, preempts):
    engine = llm("tiny-llama-3.1", **changes).engine
    before = metrics(engine)["jaxserve:compiles_total{phase=serving}"]
    work = [Work(item.prompt, item.sampling) for item in lone]
    assert bool(run(engine, work, stagger=True)) is preempts
    assert [item.token_ids for item in work] == [item.token_ids for item in lone]
    assert metrics(engine)["jaxserve:compiles_total{phase=serving}"] == before


@DEPTHS
def test_so07_prompts_in_three_chunks_give_valid_json(llm, depth):
    model = llm("tiny-llama-3.1", async_depth=depth, **SMALL_CHUNKS)
    prompts = [[5 + i, *range(20, 110)] for i in range(3)]
    for result in model.generate(prompts, held("json", SCHEMA)):
        assert result.outputs[0].finish_reason == "stop" and valid(result.outputs[0].text)


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
@DEPTHS
def test_so08_plain_and_held_answers_never_touch_each_other(llm, depth, rounds):
    """Eight at once, the same schema twice, half of them aborted, over and over."""
    model = llm("tiny-llama-3.1", async_depth=depth)
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    object_only, schema = held("json_object", max_tokens=24), held("json", SCHEMA)
    kinds = [plain, object_only, plain, schema]
    expected = {i: answer(model, params, [9 + i % 4]) for i, params in enumerate(kinds)}
    assert valid(expected[3][0])
    for turn in range(rounds):
        ids = [add_prompt(model.engine, f"so08-{depth}-{turn}-{i}", [9 + i % 4], kinds[i % 4]) for i in range(8)]
        outputs: dict[str, list[int]] = {name: [] for name in ids}
        for _ in range(turn % 10):
            for _, output in model.engine.step():
                outputs[output.request_id] += output.token_ids
        gone = ids[turn % 2 :: 2][:2] + ids[4 + turn % 3 :: 3]
        model.engine.abort(gone)
        for name, items in drain(model.engine).items():
            outputs[name] += [token for output in items for token in output.token_ids]
        for i, name in enumerate(ids):
            if name not in gone:
                text = b"".join(map(model.tokenizer.token_bytes, outputs[name])).decode("utf-8", "replace")
                assert text.startswith(expected[i % 4][0].rstrip("�"))


def add_prompt(engine: EngineCore, name: str, prompt: list[int], params: SamplingParams) -> str:
    [request] = make_requests(name, prompt, params, engine.info)
    engine.add_request(request)
    return request.request_id


def test_a_request_waits_for_its_grammar_and_nobody_else_does(llm, monkeypatch):
    engine = llm("tiny-llama-3.1").engine
    compiling: list[Future[LLMatcher]] = []
    compile_now = engine.grammars.compile
    monkeypatch.setattr(engine.grammars, "compile", lambda spec: compiling.append(Future()) or compiling[-1])
    names = [add_prompt(engine, f"slow-{i}", [5, 6], held("regex", "[ab]{3}")) for i in range(3)]
    [other] = add(engine, "other")
    seen = set()
    for _ in range(12):
        seen |= {output.request_id for _, output in engine.step()}
    assert seen == {other} and engine.has_work() and not engine.stalled
    engine.abort([names[2]])
    compiling[0].set_result(compile_now(spec("regex", "[ab]{3}")).result())
    compiling[1].set_exception(RequestError("no such thing"))
    outputs = drain(engine)
    assert len([token for output in outputs[names[0]] for token in output.token_ids]) <= 3
    assert [output.finish_reason for output in outputs[names[0]]][-1] == "stop"
    [failed] = outputs[names[1]]
    assert failed.finish_reason == "error" and failed.error == "no such thing" and names[2] not in outputs


def test_only_sampling_waits_for_the_mask(llm, monkeypatch):
    """The first half of a step is on its way before the tokens of the step before it are known; plain steps, and those
    in which no row with a grammar samples, are not split."""
    engine = llm("tiny-llama-3.1", async_depth=2).engine
    done: list[str] = []
    submit, sample, result = ModelRunner.submit, PendingStep.sample, PendingStep.result

    def submit_noted(self: ModelRunner, schedule: Any, *, masked: bool = False) -> PendingStep:
        done.append("forward" if masked else "plain")
        return submit(self, schedule, masked=masked)

    def sample_noted(self: PendingStep, mask: Any = None) -> None:
        if mask is not None:
            done.append("sample")
        sample(self, mask)

    def result_noted(self: PendingStep) -> Any:
        done.append("read")
        return result(self)

    monkeypatch.setattr(ModelRunner, "submit", submit_noted)
    monkeypatch.setattr(PendingStep, "sample", sample_noted)
    monkeypatch.setattr(PendingStep, "result", result_noted)
    add_prompt(engine, "overlap", list(range(10, 90)), held("regex", "🦊{9}", max_tokens=3))
    engine.grammars.compile(spec("regex", "🦊{9}")).result()
    drain(engine)
    assert done == [
        "plain",
        "forward",
        "read",
        "sample",
        "forward",
        "read",
        "sample",
        "forward",
        "read",
        "sample",
        "read",
    ]
    done.clear()
    add(engine, "no-overlap")
    drain(engine)
    assert set(done) == {"plain", "read"}


def test_a_grammar_that_fails_ends_its_request_alone(llm):
    """An expression may turn out to be too large only while text is matched."""
    model = llm("tiny-llama-3.1")
    broken = held("regex", "((a{1,50}){1,50}){1,50}", temperature=0.0, max_tokens=100, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    [expected] = model.generate([5, 6, 7], plain)[0].outputs
    names = [add_prompt(model.engine, "broken", [5, 6, 7], broken), add_prompt(model.engine, "fine", [5, 6, 7], plain)]
    outputs = drain(model.engine)
    assert outputs[names[0]][-1].finish_reason == "error" and "grammar" in outputs[names[0]][-1].error
    assert [token for output in outputs[names[1]] for token in output.token_ids] == expected.token_ids


def test_a_grammar_whose_request_has_gone_is_not_compiled():
    class Later:
        def compile(self, spec: StructuredSpec) -> Future[LLMatcher]:
            return futures.setdefault(spec.value, Future())

    futures: dict[str, Future[LLMatcher]] = {}
    constraints = Constraints(Later(), vocab_size=100)  # type: ignore[arg-type]
    requests = [
        make_request(4, sampling=SamplingParams(structured=StructuredSpec(kind="regex", value=value, field="f")))
        for value in "ab"
    ]
    for request in requests:
        constraints.add(request)
    constraints.forget(requests[0].request_id)
    assert futures["a"].cancelled() and not futures["b"].cancelled()
