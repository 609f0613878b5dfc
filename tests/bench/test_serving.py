"""The load generator: its workload, its figures, and what it makes of servers that are not as they should be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import serving
from bench.serving_client import Client, Plan, Record, Task
from bench.serving_report import summarise
from jaxserve.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.server.conftest import Served, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = make_checkpoint("tiny-llama-3.1", tmp_path_factory.mktemp("bench") / "model")
    tokenizer = Tokenizer.load(directory)
    with serve(tokenizer, tokenizer.encode("<|eot_id|>", False)[0]) as served:
        served.says("a word and another ", eos=False)
        yield served


def run(served: Served, *flags: str, json_path: Path) -> tuple[int, list[dict[str, Any]]]:
    common = ["--url", served.url, "--vocab-size", "100", "--input-len", "8", "--output-len", "6"]
    code = serving.main([*common, "--json", str(json_path), *flags])
    return code, json.loads(json_path.read_text())["loads"]


def test_closed_loops(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--concurrency", "1,4", "--requests", "2,9", "--clients", "2", "--slo", "ttft=60,tpot=60"]
    code, [one, four] = run(served, *flags, json_path=tmp_path / "out.json")
    assert code == 0
    assert (one["requests"], one["failed"], one["output_tokens"], one["input_tokens"]) == (2, 0, 12, 16)
    assert (four["requests"], four["failed"], four["output_tokens"], four["events"]) == (9, 0, 54, 54)
    assert four["goodput_s"] == pytest.approx(four["requests_s"])
    assert len(one["client_cpu"]) == 1 and len(four["client_cpu"]) == 2
    out = capsys.readouterr().out
    assert "| concurrency 1 | concurrency 4 |" in out and "python " in out and "| 9 (0) |" in out


def test_open_loop(served: Served, tmp_path: Path) -> None:
    code, [load] = run(served, "--rate", "40", "--requests", "20", json_path=tmp_path / "out.json")
    assert code == 0 and load["load"] == "rate 40"
    plans = serving.plan(serving.parse(["--rate", "40"]), 20, 40.0)
    assert plans[0].at and plans[-1].at and load["seconds"] > 0.8 * (plans[-1].at - plans[0].at)


def test_refusals_are_counted_and_shown(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, [load] = run(served, "--requests", "2", "--output-len", "5000", json_path=tmp_path / "out.json")
    assert code == 1 and load["failed"] == 2 and "output_tokens_s" not in load
    assert "HTTP 400" in load["first_error"] and "HTTP 400" in capsys.readouterr().out


def test_no_server_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"127\.0\.0\.1:1/v1/models"):
        serving.main(["--url", "http://127.0.0.1:1"])


@pytest.mark.parametrize(
    "flags", [["--slo", "itl=1"], ["--concurrency", "0"], ["--concurrency", "1,2,3", "--requests", "1,2"]]
)
def test_bad_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serving.parse(flags)


def test_the_lengths_are_those_of_published_figures() -> None:
    plans = serving.plan(serving.parse([]), 512)
    assert (sum(len(p.prompt) for p in plans), sum(p.max_tokens for p in plans)) == (129_735, 97_750)


def test_figures() -> None:
    records = [
        Record(input_tokens=5, sent=10.0, times=[11.0, 11.5, 13.0], output_tokens=5),
        Record(input_tokens=5, sent=12.0, times=[12.25], output_tokens=1),
        Record(input_tokens=5, sent=9.0, times=[10.0], error="lost"),
    ]
    found = summarise(records, {"ttft": 0.5})
    assert (found["requests"], found["failed"], found["first_error"]) == (3, 1, "lost")
    assert found["seconds"] == 4.0 and found["output_tokens_s"] == 1.5 and found["goodput_s"] == 0.25
    assert found["ttft"]["mean"] == 0.625 and found["e2e"]["mean"] == 1.625
    assert found["tpot"]["p50"] == 0.5 and found["itl"]["mean"] == 1.0 and found["max_itl"]["p99"] == 1.5
    assert summarise(records, {"max_itl": 1.0})["goodput_s"] == 0.25


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("pieces", "events", "tokens", "error"),
    [
        # Other line ends, comments, events torn apart, a second one in the same piece.
        ([HEAD, chunk(b': ping\r\ndata: {"choices"'), chunk(b':[{"text":"a"}]}\r\n\r\ndata:{"choices":[{}]}\r\n\r\n'),
          chunk(b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n') + END], 2, 7, None),
        ([HEAD, chunk(b'data: {"choices":[{}]}\n\ndata: {"error":{"message":"broke"}}\n\n') + END], 1, 1, "broke"),
        ([HEAD, chunk(b'data: {"choices":[{}]}\n\n')], 1, 1, "closed"),
        ([HEAD, END], 0, 0, "no tokens"),
        ([b"HTTP/1.1 429 No\r\nContent-Length: 4\r\n\r\nfull"], 0, 0, "HTTP 429: full"),
        ([b"garbage\r\n\r\n"], 0, 0, "not HTTP"),
    ],
    ids=["awkward", "error", "lost", "empty", "refused", "garbage"],
)  # fmt: skip
async def test_strange_servers(pieces: list[bytes], events: int, tokens: int, error: str | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        client = Client(Task(url=url, model="m", api_key="k", plans=[Plan([1], 2)], concurrency=1))
        await client.run(0.0)
    [record] = client.records
    assert (len(record.times), record.output_tokens) == (events, tokens)
    assert error is None if record.error is None else error is not None and error in record.error
