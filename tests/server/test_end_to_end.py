"""The real command with the real engine, seen through HTTP by OpenAI's own client and by clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.checkpoints import KINDS, build_tokenizer, byte_tokens, make_table_checkpoint
from tests.conftest import ROOT
from tests.server.running import Server, serving, wait_until

MODEL = "tiny"
REFERENCE: list[dict[str, Any]] = json.loads(Path(ROOT, "tests/data/tiny-llama-3.1.json").read_text())["cases"]
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
ABORTED = "vllm:request_success_total{finished_reason=abort}"
BOTH_ROUTES = pytest.mark.parametrize("route", ["completions", "chat"])
BOTH_KINDS = pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])


# ------------------------------------------------------------------ the servers


class Servers(dict[str, Server]):
    """Running servers by name, each started when it is first wanted."""

    def __init__(self, start: Callable[[str], Server]) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, name: str) -> Server:
        self[name] = self._start(name)
        return self[name]


@pytest.fixture(scope="module")
def servers(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The name "tiny" is tiny-llama-3.1; a kind of tokenizer is the model that goes by a table."""

    def start(name: str) -> Server:
        named = ("--served-model-name", MODEL)
        if name == "tiny":
            return stack.enter_context(serving(checkpoint("tiny-llama-3.1"), *named))
        directory = tmp_path_factory.mktemp(name)
        make_table_checkpoint(directory, table(name), kind=name, max_position_embeddings=16384)
        sizes = {"row_buckets": (4,), "token_buckets": (512,), "max_num_batched_tokens": 512}
        return stack.enter_context(serving(directory, *named, **sizes, num_gpu_blocks_override=2049))

    with ExitStack() as stack:
        yield Servers(start)


@pytest.fixture
def tiny(servers: Servers) -> Server:
    return servers["tiny"]


@pytest.fixture
def table_model(servers: Servers) -> Server:
    return servers["byte-level"]


@pytest.fixture
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with tiny.official() as official:
        yield official


def table(kind: str) -> dict[int, int | dict[int, float]]:
    """A walk through the bytes of valid UTF-8: a rare emoji, a rare Chinese character, Thai with a combining mark, a
    family of emoji with joiners. It begins after a "." or after a chat's last token. Beside it: after "w" comes
    a byte that begins no character, after "x" one whose character never ends, after "y" one that "Z" breaks off; "hi!"
    ends; "0101…" does not."""
    eos = build_tokenizer(kind).token_to_id(KINDS[kind].named["eos_token"])
    starts: list[int | bytes] = [b"\xf0", b"\xe9", b"\xe0"]
    walk: dict[int | bytes, list[int | bytes]] = {
        b".": starts,
        b"\xf0": [b"\x9f"], b"\x9f": [b"\xab", b"\x91"], b"\xab": [b"\xa0"], b"\xa0": [*starts, eos],
        b"\x91": [b"\xa8", b"\xa7"], b"\xa8": [b"\xe2"], b"\xe2": [b"\x80"], b"\x80": [b"\x8d"], b"\x8d": [b"\xf0"],
        b"\xa7": [*starts, eos],
        b"\xe9": [b"\xbe"], b"\xbe": [b"\x9c"], b"\x9c": [*starts, eos],
        b"\xe0": [b"\xb8", b"\xb9"], b"\xb8": [b"\x81"], b"\x81": [b"\xe0"], b"\xb9": [b"\x87"],
        b"\x87": [*starts, eos],
        b"w": [b"\xb5"], b"x": [b"\xc3"], b"y": [b"\xc4"], b"\xc4": [b"Z"], b"Z": [b"Z"],
        b"h": [b"i"], b"i": [b"!"],
        b"0": [b"1"], b"1": [b"0"],
    }  # fmt: skip
    end_of_chat = "\n\n" if kind == "byte-level" else " [/INST]"
    walk[build_tokenizer(kind).encode(end_of_chat).ids[-1]] = starts
    return {_id(token, kind): {_id(n, kind): 30.0 for n in following} for token, following in walk.items()}


def _id(token: int | bytes, kind: str) -> int:
    return token if isinstance(token, int) else byte_tokens(token, kind)[0]


# ------------------------------------------------------------------ asking


@dataclass
class Answer:
    """One choice, the same whether it came as a stream or at once."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def ask(client: openai.OpenAI, *, stream: bool = False, messages: Any = None, **fields: Any) -> list[Answer]:
    """The choices of a completion, or of a chat where there are messages; with any field that the server knows."""
    if stream and messages is None:
        client = lenient(client)
    create: Any = client.completions.create if messages is None else client.chat.completions.create
    given = {"prompt": fields.pop("prompt")} if messages is None else {"messages": messages}
    extra = {"return_token_ids": True, **fields}
    response = create(model=MODEL, stream=stream, extra_body=extra, **given)
    answers = [Answer() for _ in range(fields.get("n", 1))]
    for part in response if stream else [response]:
        for choice in part.choices:
            add(answers[choice.index], choice, stream)
    return answers


def lenient(client: openai.OpenAI) -> openai.OpenAI:
    """For streamed completions: the client wants a finish_reason in every chunk, where OpenAI sends it in the last."""
    return client.with_options(_extra_kwargs={"_strict_response_validation": False})


def add(answer: Answer, choice: Any, stream: bool) -> None:
    assert answer.finish_reason is None, "nothing comes after the end"
    content = choice.text if hasattr(choice, "text") else (choice.delta if stream else choice.message).content
    answer.text += content or ""
    answer.token_ids += getattr(choice, "token_ids", None) or []
    answer.finish_reason = choice.finish_reason
    answer.stop_reason = getattr(choice, "stop_reason", None)


def both_ways(client: openai.OpenAI, **fields: Any) -> Answer:
    """The only choice, streamed and at once, which must agree."""
    [whole] = ask(client, **fields)
    assert ask(client, stream=True, **fields) == [whole]
    return whole


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def gained(server: Server, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in server.metrics().items()}


def is_idle(server: Server) -> bool:
    """Nobody runs or waits, and all blocks are free."""
    now = server.metrics()
    return all(now[gauge] == 0 for gauge in GAUGES)


# ------------------------------------------------------------------ answers


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["kind"])
def test_greedy_answers_are_those_of_transformers(client: openai.OpenAI, case: dict[str, Any]) -> None:
    length = len(case["generated_ids"])
    sampling = {"temperature": 0, "max_tokens": length}
    if case["kind"] == "chat":
        fields: dict[str, Any] = {"messages": case["messages"], "logprobs": True, "top_logprobs": 5, **sampling}
        whole: Any = client.chat.completions.create(model=MODEL, **fields)
        entries = whole.choices[0].logprobs.content
        logprobs = [entry.logprob for entry in entries]
        first = [entry.logprob for entry in entries[0].top_logprobs]
        assert first == pytest.approx(case["first_step"]["top_logprobs"], abs=1e-3)
    else:
        fields = {"prompt": case.get("prompt", case["prompt_ids"]), "logprobs": 1, **sampling}
        whole = client.completions.create(model=MODEL, **fields)
        logprobs = whole.choices[0].logprobs.token_logprobs
    assert logprobs == pytest.approx(case["chosen_logprobs"], abs=1e-3)
    assert whole.usage.prompt_tokens == len(case["prompt_ids"])
    assert whole.usage.completion_tokens == length
    answer = both_ways(client, **{name: value for name, value in fields.items() if "logprobs" not in name})
    assert answer.token_ids == case["generated_ids"]
    assert answer.text == case.get("text", answer.text)
    assert answer.finish_reason == case["finish"]


def test_so05_a_schema_is_enforced_and_a_bad_one_refused(client: openai.OpenAI) -> None:
    names = ["北风", "Fjällräv", "🦊"]
    schema = {
        "type": "object",
        "properties": {"name": {"enum": names}},
        "required": ["name"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {"messages": user("Who?"), "temperature": 1, "seed": 3, "max_tokens": 300}
    held: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    answer = both_ways(client, **fields, response_format=held)
    assert json.loads(answer.text)["name"] in names and answer.finish_reason == "stop"
    held["json_schema"]["schema"] = {"type": "unknown"}
    with pytest.raises(openai.BadRequestError, match="unknown"):
        ask(client, **fields, response_format=held)


@BOTH_ROUTES
def test_choices_of_a_seed_differ_repeat_and_are_counted(client: openai.OpenAI, route: str) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    fields |= {"prompt": "Once upon a time"} if route == "completions" else {"messages": user("Tell me a story.")}
    answers = ask(client, **fields)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    assert ask(client, stream=True, **fields) == answers
    create: Any = client.completions.create if route == "completions" else client.chat.completions.create
    lone = create(model=MODEL, **(fields | {"n": 1})).usage
    streamed: Any = lenient(client).completions.create if route == "completions" else create
    *chunks, last = streamed(model=MODEL, stream=True, stream_options={"include_usage": True}, **fields)
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    assert len({(chunk.id, chunk.created) for chunk in (*chunks, last)}) == 1
    assert last.usage == create(model=MODEL, **fields).usage
    assert last.usage.prompt_tokens == lone.prompt_tokens, "the prompt counts once"
    assert last.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)


def test_eight_at_once_get_what_each_gets_alone(tiny: Server, client: openai.OpenAI) -> None:
    """Prompts around the edges of blocks and chunks, greedy and seeded; at once, one half of them is streamed."""
    rng = random.Random(0)
    requests = [
        {
            "prompt": [rng.randrange(500) for _ in range(length)],
            "max_tokens": 60 + 30 * number,
            "ignore_eos": True,
            **({"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}),
        }
        for number, length in enumerate((1, 200, 15, 16, 17, 64, 65, 130))
    ]
    steps = "jaxserve:step_duration_seconds_count{kind=decode}"
    before = tiny.metrics()
    alone = [ask(client, **fields) for fields in requests]
    steps_alone = gained(tiny, before)[steps]
    before = tiny.metrics()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask, client, stream=number in (0, 1, 4, 5), **f) for number, f in enumerate(requests)]
        together = [future.result() for future in futures]
    assert together == alone
    assert [len(answer.token_ids) for [answer] in alone] == [fields["max_tokens"] for fields in requests]
    assert gained(tiny, before)[steps] < steps_alone * 0.8, "they shared no steps, and the test shows nothing"


@pytest.mark.parametrize(
    "sampler",
    [{"temperature": 0}, {"temperature": 1, "top_p": 1}, {"min_p": 0.05}, {"top_k": 8}, {"top_p": 0.7}],
    ids=lambda sampler: ",".join(sampler),
)
def test_sp01_sp12_stop_strings_inside_tokens_with_every_sampler(
    client: openai.OpenAI, sampler: dict[str, Any]
) -> None:
    fields = {"prompt": "The capital of France is", "max_tokens": 40, "seed": 3, "temperature": 1, **sampler}
    whole: Any = client.completions.create(model=MODEL, logprobs=0, extra_body=fields, prompt=fields["prompt"])
    known, logprobs = whole.choices[0].text, whole.choices[0].logprobs
    pairs = zip(logprobs.tokens, logprobs.tokens[1:], logprobs.text_offset, strict=False)
    # From the second character of a token to the first of the next one.
    stops = [(a[1:] + b[0], offset - logprobs.text_offset[0] + 1) for a, b, offset in pairs if min(len(a), len(b)) > 1]
    stop = next(stop for stop, at in stops if "�" not in stop and known.find(stop) == at)
    answer = both_ways(client, stop=[stop], **fields)
    assert answer.text == known[: known.index(stop)] != known
    assert answer.finish_reason == "stop" and answer.stop_reason == stop


def test_sp05_stopping_on_the_eos_id_changes_no_text(table_model: Server) -> None:
    eos = build_tokenizer("byte-level").token_to_id("<|eot_id|>")
    with table_model.official() as client:
        natural = both_ways(client, prompt=byte_tokens(b"h"), max_tokens=9)
        asked = both_ways(client, prompt=byte_tokens(b"h"), max_tokens=9, stop_token_ids=[eos])
    assert natural.text == asked.text == "i!"
    assert natural.finish_reason == asked.finish_reason == "stop"


@BOTH_KINDS
@BOTH_ROUTES
def test_st16_split_characters_come_whole(servers: Servers, kind: str, route: str) -> None:
    fields: dict[str, Any] = {"messages": user("Go")} if route == "chat" else {"prompt": byte_tokens(b".", kind)}
    value_of = {byte_tokens(bytes([value]), kind)[0]: value for value in range(256)}
    seen, ended = set(), 0
    with servers[kind].official() as client:
        for seed in range(24):
            answer = both_ways(client, seed=seed, max_tokens=60, **fields)
            raw = bytes(value_of[token] for token in answer.token_ids if token in value_of)
            assert answer.text == raw.decode("utf-8", "replace")
            assert "�" not in answer.text.removesuffix("�")
            if answer.finish_reason == "stop":
                assert "�" not in answer.text
                ended += 1
            seen |= set(answer.text)
    assert ended and seen >= set("\U0001fae0\u9f9c\u0e01\u0e47\u200d\U0001f468\U0001f467"), "the test would show little"


@BOTH_KINDS
@pytest.mark.parametrize(
    ("prompt", "fields", "reason"),
    [
        (b"x", {}, "stop"),
        (b"x", {"max_tokens": 1}, "length"),
        (b"y", {"stop": ["Z"]}, "stop"),
        (b"w", {}, "stop"),
    ],
    ids=["eos", "length", "stop string", "no beginning"],
)
def test_st18_st21_broken_characters_are_the_same_in_both_modes(
    servers: Servers, kind: str, prompt: bytes, fields: dict[str, Any], reason: str
) -> None:
    with servers[kind].official() as client:
        answer = both_ways(client, prompt=byte_tokens(prompt, kind), **fields)
    assert (answer.text, answer.finish_reason) == ("�", reason)


def test_st18_nonsense_is_valid_json(tiny: Server) -> None:
    """At temperature 2 half of the tokens are single bytes that make no characters."""

    def nonsense(seed: int) -> str:
        fields = {"prompt": "x", "temperature": 2, "top_p": 1, "max_tokens": 100, "seed": seed, "ignore_eos": True}
        response = tiny.http.post("/v1/completions", json=fields | {"stream": seed % 2 == 0}).raise_for_status()
        if seed % 2:
            return response.json()["choices"][0]["text"]
        *events, done, end = response.content.decode("utf-8", "strict").split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(nonsense, range(50)))
    assert all("�" in text for text in texts)
    assert tiny.status() == 200


def test_st11_a_long_prompt_is_not_met_with_silence(table_model: Server) -> None:
    with table_model.official() as client:
        begin = time.monotonic()
        stream = client.chat.completions.create(
            model=MODEL,
            messages=user("the " * 8000),
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"deadline_ms": 50_000},  # comments keep a silent stream open
        )
        *chunks, last = stream
    assert time.monotonic() - begin < 60
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert any(chunk.choices[0].delta.content for chunk in chunks)
    assert last.choices == [] and last.usage.prompt_tokens >= 8000


# ------------------------------------------------------------------ clients that leave


def test_st12_a_client_that_is_killed_stops_its_plain_request(table_model: Server) -> None:
    before = table_model.metrics()
    fields = {"messages": user("Go"), "ignore_eos": True, "max_tokens": 15000}
    with socket.create_connection(("127.0.0.1", table_model.port)) as connection:
        connection.sendall(http_request("/v1/chat/completions", fields))
        wait_until(lambda: table_model.metrics()["vllm:num_requests_running"] == 1)
    wait_until(lambda: is_idle(table_model), 1.5)
    assert gained(table_model, before)[ABORTED] == 1


def test_200_clients_that_leave_at_any_moment(tiny: Server, client: openai.OpenAI) -> None:
    before = tiny.metrics()
    known = asyncio.run(_200_clients(tiny.port))
    begin = time.monotonic()
    [answer] = ask(client, prompt="Hello", temperature=0, max_tokens=4, ignore_eos=True)
    assert time.monotonic() - begin < 5
    assert len(answer.token_ids) == 4
    wait_until(lambda: is_idle(tiny), 2)
    after = gained(tiny, before)
    assert known <= after[ABORTED] <= 200
    assert after["vllm:request_success_total{finished_reason=length}"] < 10, "answers were finished for nobody"
    assert after["vllm:request_success_total{finished_reason=error}"] == 0


async def _200_clients(port: int) -> int:
    """All of them come within a second; the number of those whose requests the engine must have known."""
    rng = random.Random(0)
    return sum(await asyncio.gather(*(_leave(port, number, rng) for number in range(200))))


async def _leave(port: int, number: int, rng: random.Random) -> bool:
    """Leaves within 0.1 s, mostly before the first byte; or in the middle of the request; or of the stream (true)."""
    in_request, in_stream, streamed = number % 20 == 3, number % 4 == 0, number % 4 < 2
    route, asked = (
        ("/v1/completions", {"prompt": "x"}) if number % 8 < 4 else ("/v1/chat/completions", {"messages": user("x")})
    )
    request = http_request(route, asked | {"max_tokens": 450, "ignore_eos": True, "stream": streamed})
    await asyncio.sleep(rng.random())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request[: rng.randrange(len(request))] if in_request else request)
    if in_stream:
        for _ in range(rng.randrange(1, 30)):
            await reader.readuntil(b"data: ")
    else:
        await asyncio.sleep(rng.random() * 0.1)
    writer.transport.abort()
    return in_stream


def http_request(route: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# ------------------------------------------------------------------ prefix cache


def test_sc05_usage_tells_what_was_cached_until_the_cache_is_reset(tiny: Server, client: openai.OpenAI) -> None:
    """Prompts around the block size, each twice, in both modes; a salt of one's own finds nothing."""

    def complete(prompt: list[int], **fields: Any) -> tuple[int, str]:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=6, temperature=0, extra_body={"ignore_eos": True, **fields}
        )
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].text

    before = tiny.metrics()
    for length in (15, 16, 17, 32, 33):
        prompt = [100 + length] * length
        cold, warm, salted = complete(prompt), complete(prompt), complete(prompt, cache_salt="mine")
        assert [cold[0], warm[0], salted[0]] == [0, (length - 1) // 16 * 16, 0]
        assert cold[1] == warm[1] == salted[1]
    counts = gained(tiny, before)
    assert counts["vllm:prefix_cache_hits_total"] == counts["vllm:prompt_tokens_cached_total"] == 64
    assert counts["vllm:prefix_cache_queries_total"] == 3 * (15 + 16 + 17 + 32 + 33)
    assert tiny.http.post("/reset_prefix_cache").status_code == 200
    assert complete([133] * 33)[0] == 0 and complete([133] * 33)[0] == 32


@BOTH_ROUTES
def test_at_its_deadline_an_answer_ends_with_what_it_has(tiny: Server, route: str) -> None:
    """Plain and streamed; nobody else notices."""
    fields = {"completions": {"prompt": "Once"}, "chat": {"messages": [{"role": "user", "content": "Once"}]}}[route]
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[route]
    body = {**fields, "max_tokens": 450, "ignore_eos": True, "deadline_ms": 20, "temperature": 0}
    answer = tiny.http.post(path, json=body).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["stop_reason"] == "deadline"
    assert answer["usage"]["completion_tokens"] < 450
    events = tiny.http.post(path, json={**body, "stream": True}).text.split("\n\n")
    [last] = json.loads(events[-3].removeprefix("data: "))["choices"]
    assert last["finish_reason"] == "length" and last["stop_reason"] == "deadline" and events[-2] == "data: [DONE]"


# ------------------------------------------------------------------ metrics and processes


def test_metrics_have_vllms_names(tiny: Server) -> None:
    names = {name.partition("{")[0] for name in tiny.metrics()}
    counters = ("num_preemptions", "prompt_tokens", "generation_tokens", "request_success")
    histograms = (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "iteration_tokens_total", "request_params_n", "request_params_max_tokens",
        "request_num_preemptions",
    )  # fmt: skip
    expected = {*GAUGES, "vllm:cache_config_info", *(f"vllm:{name}_total" for name in counters)}
    expected |= {f"vllm:{name}_{part}" for name in histograms for part in ("count", "sum")}
    expected |= {f"jaxserve:{name}" for name in ("compiles_total", "startup_seconds", "engine_idle_seconds_total")}
    expected |= {f"jaxserve:{name}_count" for name in ("step_duration_seconds", "padding_waste_ratio")}
    assert expected <= names
    response = tiny.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    unlabelled = [
        line
        for line in response.text.splitlines()
        if not line.startswith(("#", "vllm:cache_config_info")) and f'model_name="{MODEL}"' not in line
    ]
    assert not unlabelled


def test_metrics_add_up(tiny: Server, client: openai.OpenAI) -> None:
    requests, prompt, length = 6, 20, 9
    before = tiny.metrics()
    with ThreadPoolExecutor(requests) as pool:
        fields = {"prompt": list(range(prompt)), "max_tokens": length, "ignore_eos": True}
        list(pool.map(lambda number: ask(client, stream=number % 2 == 0, **fields), range(requests)))
    after = gained(tiny, before)
    assert after["vllm:inter_token_latency_seconds_count"] == requests * (length - 1)
    assert after["vllm:iteration_tokens_total_sum"] == requests * (prompt + length)
    assert after["vllm:prompt_tokens_total"] == requests * prompt
    assert after["vllm:generation_tokens_total"] == requests * length
    assert after["vllm:request_success_total{finished_reason=length}"] == requests
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert after[f"vllm:{name}_seconds_count"] == requests
    assert after["vllm:request_params_max_tokens_sum"] == requests * length
    assert is_idle(tiny)


def test_an_echo_has_the_logprobs_that_its_tokens_were_generated_with(client: openai.OpenAI) -> None:
    """Streamed, plain and without a token more; in any of these the prompt's own are the same too."""
    client = lenient(client)  # its own types do not know the null that the first token has
    prompt = REFERENCE[0]["prompt_ids"]
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 2, "echo": True}
    [whole] = client.completions.create(prompt=prompt, max_tokens=12, **fields).choices
    assert whole.logprobs and whole.logprobs.token_logprobs and whole.logprobs.tokens
    values = whole.logprobs.token_logprobs
    count = len(values) - len(prompt)
    generated = REFERENCE[0]["generated_ids"][:count]
    assert values[0] is None and values[len(prompt) :] == pytest.approx(
        REFERENCE[0]["chosen_logprobs"][:count], abs=1e-3
    )

    [echoed] = client.completions.create(prompt=prompt + generated, max_tokens=0, **fields).choices
    assert echoed.logprobs and echoed.logprobs.token_logprobs and echoed.finish_reason == "length"
    assert echoed.logprobs.token_logprobs[1:] == pytest.approx(values[1:], abs=1e-4)
    assert echoed.logprobs.tokens == whole.logprobs.tokens

    streamed: list[Any] = []
    for chunk in client.completions.create(prompt=prompt, max_tokens=12, stream=True, **fields):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.token_logprobs) or []
    assert streamed[1:] == pytest.approx(values[1:], abs=1e-4) and len(streamed) == len(values)


def test_embeddings_and_scores(tiny: Server, client: openai.OpenAI) -> None:
    texts = ["A cat sat on a mat.", "xyzzy 12345", "A cat sat on a mat."]
    before = tiny.metrics()
    vectors = [
        item.embedding for item in client.embeddings.create(model=MODEL, input=texts, encoding_format="float").data
    ]
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-5) != pytest.approx(vectors[1], abs=1e-2)
    assert sum(x * x for x in vectors[0]) == pytest.approx(1.0, abs=1e-5)
    body = {"model": MODEL, "text_1": texts[0], "text_2": texts[1:]}
    scores = [item["score"] for item in tiny.http.post("/v1/score", json=body).json()["data"]]
    assert scores == pytest.approx([sum(a * b for a, b in zip(*vectors[:2], strict=True)), 1.0], abs=1e-4)
    after = gained(tiny, before)
    assert after["vllm:request_success_total{finished_reason=length}"] == 6
    assert after["vllm:prompt_tokens_total"] > 0 and after.get("vllm:generation_tokens_total", 0) == 0


def test_the_api_process_has_no_jax(tiny: Server) -> None:
    """Not even in part: the libraries that a process has mapped show it."""

    def has_jax(process: Any) -> bool:
        return any("jaxlib" in mapped.path for mapped in process.memory_maps())

    assert has_jax(tiny.engine), "the test would show nothing"
    assert not has_jax(tiny.api)


def test_nothing_was_compiled_while_serving_all_of_this(servers: Servers) -> None:
    """After all the requests of this module."""
    assert servers
    for server in servers.values():
        assert is_idle(server)
        counts = server.metrics()
        assert counts["jaxserve:compiles_total{phase=startup}"] > 0
        assert counts["jaxserve:compiles_total{phase=serving}"] == 0


def test_the_log_has_nothing_to_complain_of(servers: Servers) -> None:
    for server in servers.values():
        assert not [line for line in server.log.splitlines() if " ERROR " in line or " WARNING " in line]
